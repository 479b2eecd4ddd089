#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace ddp::launcher::test {

/// Long enough for a machine that is busy with other things; a test that waits as long has failed.
constexpr std::chrono::seconds kPatience{60};

/// Looks at `condition` again and again until it holds, and fails the test where it never does.
void await(const char* what, const std::function<bool()>& condition,
           std::chrono::seconds patience = kPatience);

/// One run of the real launcher. It has a folder of its own, which the workers find in $DIR, and
/// all its processes carry a mark in their environment, by which what is left of them is found.
class LaunchProcess {
 public:
  struct Setup {
    std::string name = "launch";  ///< or "ddprun"
    std::string input;            ///< its standard input
    std::vector<std::pair<std::string, std::string>> environment;
    std::function<void()> before_exec;  ///< runs in the new process
    std::vector<std::string>
        run_through;  ///< a command that gets the launcher's path and arguments
  };

  explicit LaunchProcess(const std::vector<std::string>& arguments)
      : LaunchProcess(arguments, Setup{}) {}
  LaunchProcess(const std::vector<std::string>& arguments, const Setup& setup);
  LaunchProcess(const LaunchProcess&) = delete;
  LaunchProcess& operator=(const LaunchProcess&) = delete;
  /// Kills what is left and removes the folder.
  ~LaunchProcess();

  pid_t pid() const { return pid_; }
  /// The second process of the launcher, the parent of the workers.
  pid_t guardian() const;
  const std::string& folder() const { return folder_; }

  /// Waits for its end. Returns its exit status (128 + N for signal N).
  int wait(std::chrono::seconds patience = kPatience);
  double seconds() const { return seconds_; }
  std::string output() const { return read("stdout"); }
  std::string errors() const { return read("stderr"); }

  /// Files in the folder, as the workers leave them.
  bool has(const std::string& file) const;
  std::string read(const std::string& file) const;
  void write(const std::string& file, const std::string& text = "") const;
  /// Waits until a worker has left all of `files`.
  void await_files(const std::vector<std::string>& files) const;
  pid_t pid_from(const std::string& file) const;

  /// The living processes of this run, the launcher's own included.
  std::vector<pid_t> processes() const;
  /// Waits until there are none.
  bool none_left(std::chrono::seconds patience = kPatience) const;

 private:
  std::string folder_;
  std::string mark_;
  pid_t pid_ = -1;
  bool ended_ = false;
  double seconds_ = 0;
  std::chrono::steady_clock::time_point started_;
};

/// Arguments for the launcher: `options`, then sh with `script`.
std::vector<std::string> with_script(std::vector<std::string> options, const std::string& script);

/// Where the test's worker program lies.
std::string worker_program();

/// The state letter of a process in /proc, 0 where there is none.
char process_state(pid_t pid);

}  // namespace ddp::launcher::test
