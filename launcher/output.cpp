#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include <fmt/format.h>

#include <launcher/error.h>
#include <launcher/message.h>
#include <launcher/output.h>
#include <launcher/set_aside.h>
#include <launcher/text_template.h>

namespace ddp::launcher {
namespace {

constexpr size_t kReadSize = 64 * 1024;
constexpr int kOutputStream = 0;
constexpr int kErrorStream = 1;
constexpr const char* kFileNames[] = {"stdout.log", "stderr.log"};

[[noreturn]] void fail(const char* what, const std::string& path) {
  throw Error(ExitStatus::kSetup,
              fmt::format("cannot {} {}: {}\nSee --log_dir.", what, path, std::strerror(errno)));
}

void make_folders(const std::string& path) {
  for (size_t end = path.find('/', 1); true; end = path.find('/', end + 1)) {
    const std::string part = path.substr(0, end);
    struct stat status {};
    if (::mkdir(part.c_str(), 0777) != 0 &&
        (errno != EEXIST || ::stat(part.c_str(), &status) != 0 || !S_ISDIR(status.st_mode))) {
      fail("make the folder", part);
    }
    if (end == std::string::npos) return;
  }
}

UniqueFd create(const std::string& path) {
  UniqueFd fd = create_file(path);
  if (!fd) fail("write", path);
  return fd;
}

}  // namespace

Output::Output(const Job& job, EventLoop& loop) : job_(job), loop_(loop) {
  const int workers = job.options.nproc_per_node;
  bool piped = false;
  for (int local_rank = 0; local_rank < workers; ++local_rank) {
    for (const int stream : {kOutputStream, kErrorStream})
      piped |= way_of(local_rank, stream) == Way::kPipe;
  }
  if (!piped) return;
  buffer_.resize(kReadSize);
  const uint32_t count = same_file(STDOUT_FILENO, STDERR_FILENO) ? 1 : 2;
  for (uint32_t i = 0; i < count; ++i) {
    screens_.push_back(std::make_unique<Screen>(i == 0 ? STDOUT_FILENO : STDERR_FILENO, loop,
                                                EventTag{EventTag::Source::kScreen, i}));
  }
}

Output::Way Output::way_of(int local_rank, int stream) const {
  const Options& options = job_.options;
  const int bit = stream == kOutputStream ? StreamMask::kOutput : StreamMask::kErrors;
  const bool visible = !options.visible || options.visible->count(local_rank) != 0;
  const bool tee = (options.tee.of(local_rank) & bit) != 0;
  const bool redirected = (options.redirects.of(local_rank) & bit) != 0;
  if (tee && visible) return Way::kPipe;
  if (redirected || (tee && !options.log_dir.empty())) return Way::kFile;
  if (!visible) return Way::kNothing;
  return options.prefix_all ? Way::kPipe : Way::kInherited;
}

size_t Output::files_needed() const {
  size_t count = screens_.size();
  for (int local_rank = 0; local_rank < job_.options.nproc_per_node; ++local_rank) {
    for (const int stream : {kOutputStream, kErrorStream}) {
      if (way_of(local_rank, stream) != Way::kPipe) continue;
      count += path_of(local_rank, stream).empty() ? 1 : 2;
    }
  }
  return count;
}

void Output::begin_attempt(int attempt) {
  attempt_ = attempt;
  ends_expected_ = false;
  pipes_.clear();
  pipes_.resize(static_cast<size_t>(job_.options.nproc_per_node) * 2);
  if (job_.options.log_dir.empty()) return;
  for (int local_rank = 0; local_rank < job_.options.nproc_per_node; ++local_rank)
    make_folders(folder_of(local_rank));
}

std::string Output::folder_of(int local_rank) const {
  if (job_.options.log_dir.empty()) return {};
  return fmt::format("{}/{}/attempt_{}/{}", job_.options.log_dir, job_.run_id, attempt_,
                     job_.placement.rank(local_rank));
}

std::string Output::path_of(int local_rank, int stream) const {
  const Options& options = job_.options;
  const int bit = stream == kOutputStream ? StreamMask::kOutput : StreamMask::kErrors;
  if (options.log_dir.empty() ||
      ((options.tee.of(local_rank) | options.redirects.of(local_rank)) & bit) == 0) {
    return {};
  }
  return fmt::format("{}/{}", folder_of(local_rank), kFileNames[stream]);
}

std::vector<std::string> Output::files_of(int local_rank) const {
  std::vector<std::string> files;
  for (const int stream : {kOutputStream, kErrorStream}) {
    std::string path = path_of(local_rank, stream);
    if (!path.empty()) files.push_back(std::move(path));
  }
  return files;
}

std::string Output::prefix_of(int local_rank) const {
  return expand_template(job_.options.line_prefix,
                         {{"rank", std::to_string(job_.placement.rank(local_rank))},
                          {"local_rank", std::to_string(local_rank)},
                          {"role_name", job_.options.role}});
}

std::array<UniqueFd, 2> Output::open_streams(int local_rank) {
  std::array<UniqueFd, 2> streams;
  for (const int stream : {kOutputStream, kErrorStream}) {
    UniqueFd& end = streams[static_cast<size_t>(stream)];
    switch (way_of(local_rank, stream)) {
      case Way::kInherited:
        break;
      case Way::kNothing:
        end = UniqueFd(::open("/dev/null", O_WRONLY | O_CLOEXEC));
        break;
      case Way::kFile:
        end = create(path_of(local_rank, stream));
        break;
      case Way::kPipe: {
        const size_t index = static_cast<size_t>(local_rank) * 2 + static_cast<size_t>(stream);
        Pipe& pipe = pipes_[index];
        pipe.path = path_of(local_rank, stream);
        if (!pipe.path.empty()) pipe.file = create(pipe.path);
        int ends[2];
        if (::pipe2(ends, O_CLOEXEC) != 0) {
          throw Error(ExitStatus::kSetup,
                      fmt::format("cannot make a pipe: {}", std::strerror(errno)));
        }
        pipe.fd = UniqueFd(ends[0]);
        end = UniqueFd(ends[1]);
        ::fcntl(pipe.fd.get(), F_SETFL, O_NONBLOCK);
        pipe.screen = screen_of(stream);
        pipe.prefix = prefix_of(local_rank);
        loop_.watch(pipe.fd.get(), EPOLLIN,
                    {EventTag::Source::kPipe, static_cast<uint32_t>(index)});
        ++open_pipes_;
      }
    }
  }
  return streams;
}

void Output::handle_pipe(size_t index) {
  Pipe& pipe = pipes_[index];
  if (!pipe.fd || pipe.paused) return;
  // Once for each time that the loop says so: everybody gets his turn.
  read_once(pipe);
  if (pipe.fd && screens_[pipe.screen]->full()) pause(pipe);
}

void Output::pause(Pipe& pipe) {
  // Not only no events asked for: the end of a pipe is told all the same.
  pipe.paused = true;
  loop_.forget(pipe.fd.get());
}

void Output::read_once(Pipe& pipe) {
  const ssize_t size = ::read(pipe.fd.get(), buffer_.data(), buffer_.size());
  if (size > 0) {
    take(pipe, {buffer_.data(), static_cast<size_t>(size)});
    return;
  }
  // A pipe that somebody outside the job still holds open never tells of its end.
  if (size < 0 && (errno == EINTR || (errno == EAGAIN && !ends_expected_))) return;
  close(pipe);
}

void Output::take(Pipe& pipe, std::string_view bytes) {
  if (pipe.file) {
    std::string_view left = bytes;
    while (!left.empty()) {
      const ssize_t written = ::write(pipe.file.get(), left.data(), left.size());
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) {
        const int error = errno;
        pipe.file.reset();
        say(fmt::format("cannot write {}: {}; the rest is only shown", pipe.path,
                        std::strerror(error)));
        break;
      }
      left.remove_prefix(static_cast<size_t>(written));
    }
  }
  Screen& screen = *screens_[pipe.screen];
  pipe.lines.feed(
      bytes, [&](std::string_view line, char end) { screen.show(&pipe, pipe.prefix, line, end); },
      [&] { screen.end_bar(&pipe); });
  screen.flush();
}

void Output::close(Pipe& pipe) {
  Screen& screen = *screens_[pipe.screen];
  pipe.lines.finish(
      [&](std::string_view line, char end) { screen.show(&pipe, pipe.prefix, line, end); });
  screen.end_bar(&pipe);
  screen.flush();
  if (!pipe.paused) loop_.forget(pipe.fd.get());
  pipe.fd.reset();
  pipe.file.reset();
  --open_pipes_;
}

void Output::handle_screen(size_t index) {
  screens_[index]->flush();
  if (!screens_[index]->full()) resume(index);
}

void Output::resume(size_t screen) {
  for (size_t i = 0; i < pipes_.size(); ++i) {
    Pipe& pipe = pipes_[i];
    if (!pipe.fd || !pipe.paused || pipe.screen != screen) continue;
    if (ends_expected_) {
      read_to_end(pipe);
    } else {
      pipe.paused = false;
      loop_.watch(pipe.fd.get(), EPOLLIN, {EventTag::Source::kPipe, static_cast<uint32_t>(i)});
    }
  }
}

void Output::expect_ends() {
  if (ends_expected_) return;
  ends_expected_ = true;
  for (Pipe& pipe : pipes_) {
    if (!pipe.fd) continue;
    if (!pipe.paused) pause(pipe);
    read_to_end(pipe);
  }
}

void Output::read_to_end(Pipe& pipe) {
  while (pipe.fd && !screens_[pipe.screen]->full()) read_once(pipe);
}

bool Output::all_shown() const {
  for (const auto& screen : screens_) {
    if (!screen->empty()) return false;
  }
  return true;
}

void Output::abandon_screens() {
  for (size_t i = 0; i < screens_.size(); ++i) {
    screens_[i]->abandon();
    resume(i);
  }
}

void Output::say(std::string_view text) {
  if (screens_.empty()) {
    print_message(text);
  } else {
    screens_.back()->say(message_text(text));
  }
}

}  // namespace ddp::launcher
