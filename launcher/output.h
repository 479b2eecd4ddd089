#pragma once

#include <array>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <launcher/event_loop.h>
#include <launcher/job.h>
#include <launcher/line_splitter.h>
#include <launcher/screen.h>
#include <launcher/unique_fd.h>

namespace ddp::launcher {

/// What becomes of what the workers write.
///
/// By default nothing: their standard output and error are the launcher's own. What goes to a file
/// alone is written there by the worker itself. Only what is shown line by line after a prefix
/// comes through the launcher, by a pipe for each stream: into the file as it is, to the screen by
/// lines. A worker waits, as on any pipe, when the screen takes no more.
class Output {
 public:
  Output(const Job& job, EventLoop& loop);

  /// How many files it keeps open while the workers run.
  size_t files_needed() const;

  /// Makes the folders of this attempt's files. Throws Error.
  void begin_attempt(int attempt);

  /// What becomes a worker's standard output and error; to be closed once it has been started. An
  /// empty one: the launcher's own. Throws Error where a file cannot be made.
  std::array<UniqueFd, 2> open_streams(int local_rank);

  /// A worker's folder in this attempt, empty without --log_dir.
  std::string folder_of(int local_rank) const;

  /// The files that have what a worker wrote.
  std::vector<std::string> files_of(int local_rank) const;

  void handle_pipe(size_t index);
  void handle_screen(size_t index);

  /// Called when no worker is left that could write: what is still in the pipes is all there is.
  void expect_ends();

  bool all_read() const { return open_pipes_ == 0; }
  bool all_shown() const;

  /// Stops showing: nobody waits for the screen any more. Files are completed.
  void abandon_screens();

  /// Shows a message of the launcher on standard error, between the workers' lines.
  void say(std::string_view text);

 private:
  struct Pipe {
    UniqueFd fd;
    UniqueFd file;
    std::string path;  ///< of `file`
    size_t screen;
    std::string prefix;
    LineSplitter lines;
    bool paused = false;
  };

  enum class Way { kInherited, kNothing, kFile, kPipe };

  Way way_of(int local_rank, int stream) const;
  std::string path_of(int local_rank, int stream) const;
  std::string prefix_of(int local_rank) const;
  size_t screen_of(int stream) const {
    return screens_.size() == 1 ? 0 : static_cast<size_t>(stream);
  }
  void pause(Pipe& pipe);
  void read_once(Pipe& pipe);
  void read_to_end(Pipe& pipe);
  void take(Pipe& pipe, std::string_view bytes);
  void close(Pipe& pipe);
  void resume(size_t screen);

  const Job& job_;
  EventLoop& loop_;
  std::vector<std::unique_ptr<Screen>> screens_;  ///< none: nothing comes through the launcher
  std::vector<Pipe> pipes_;
  size_t open_pipes_ = 0;
  bool ends_expected_ = false;
  int attempt_ = 0;
  std::vector<char> buffer_;
};

}  // namespace ddp::launcher
