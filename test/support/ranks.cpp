#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdexcept>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <test/support/ranks.h>
#include <unistd.h>

#include <ddp/error.h>

namespace ddp::test {
namespace {

using Clock = std::chrono::steady_clock;

void write_all(int fd, const std::string& text) {
  const char* data = text.data();
  std::size_t left = text.size();
  while (left > 0) {
    const auto written = write(fd, data, left);
    if (written < 0) {
      return;
    }
    data += written;
    left -= static_cast<std::size_t>(written);
  }
}

/// length name '\0' value, as one message of the pipe.
std::string message(const std::string& name, const std::string& value) {
  const std::string content = name + '\0' + value;
  const auto size = static_cast<std::uint32_t>(content.size());
  std::string text(sizeof(size), '\0');
  std::memcpy(text.data(), &size, sizeof(size));
  return text + content;
}

struct Process {
  pid_t pid = -1;
  int pipe = -1;
  std::string unread;
  bool ended = false;
};

constexpr const char* kErrorType = "\1error_type";
constexpr const char* kError = "\1error";

int run_body(const Rank& rank, const std::function<void(const Rank&)>& body) {
  const auto failed = [&](const char* type, const char* text) {
    rank.report(kErrorType, std::string(type));
    rank.report(kError, std::string(text));
    return 1;
  };
  try {
    body(rank);
    return 0;
  } catch (const UsageError& error) {
    return failed("UsageError", error.what());
  } catch (const CommunicationError& error) {
    return failed("CommunicationError", error.what());
  } catch (const Error& error) {
    return failed("Error", error.what());
  } catch (const std::exception& error) {
    return failed("exception", error.what());
  }
}

void set(const char* name, const std::string& value) {
  if (value.empty()) {
    unsetenv(name);
  } else {
    setenv(name, value.c_str(), 1);
  }
}

void take_messages(Process& process, RankResult& result,
                   const std::function<void(const std::string&)>& on_value) {
  for (;;) {
    std::uint32_t size = 0;
    if (process.unread.size() < sizeof(size)) {
      return;
    }
    std::memcpy(&size, process.unread.data(), sizeof(size));
    if (process.unread.size() < sizeof(size) + size) {
      return;
    }
    const auto content = process.unread.substr(sizeof(size), size);
    process.unread.erase(0, sizeof(size) + size);
    const auto end = content.find('\0');
    const auto name = content.substr(0, end);
    const auto value = content.substr(end + 1);
    if (name == kErrorType) {
      result.error_type = value;
    } else if (name == kError) {
      result.error = value;
    } else {
      result.values[name] = value;
      on_value(name);
    }
  }
}

}  // namespace

const std::string& RankResult::operator[](const std::string& name) const {
  static const std::string missing = "(not reported)";
  const auto entry = values.find(name);
  return entry == values.end() ? missing : entry->second;
}

void Rank::report(const std::string& name, const std::string& value) const {
  write_all(pipe_, message(name, value));
}

void fail_rank(const char* file, int line, const char* expression) {
  throw std::logic_error(std::string(file) + ":" + std::to_string(line) + ": " + expression);
}

ReservedPort::ReservedPort() {
  fd_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int on = 1;
  setsockopt(fd_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  if (fd_ < 0 || bind(fd_, reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    throw std::runtime_error("no port could be reserved on loopback");
  }
  port_ = ntohs(address.sin_port);
}

ReservedPort::~ReservedPort() { close(fd_); }

std::vector<RankResult> run_ranks(int world_size, const std::function<void(const Rank&)>& body,
                                  const RankOptions& options) {
  return run_ranks(world_size, body, options, {});
}

std::vector<RankResult> run_ranks(int world_size, const std::function<void(const Rank&)>& body,
                                  const RankOptions& options,
                                  const std::vector<Trigger>& triggers) {
  const ReservedPort reserved;
  const auto start = Clock::now();
  const auto seconds_since_start = [&] {
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  std::vector<Process> processes(world_size);
  std::vector<RankResult> results(world_size);
  for (int rank = 0; rank < world_size; ++rank) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) {
      throw std::runtime_error("pipe2 failed");
    }
    const pid_t pid = fork();
    if (pid == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      close(ends[0]);
      set("RANK", std::to_string(rank));
      set("LOCAL_RANK", std::to_string(rank));
      set("WORLD_SIZE", std::to_string(world_size));
      set("LOCAL_WORLD_SIZE", std::to_string(world_size));
      set("MASTER_ADDR", "127.0.0.1");
      set("MASTER_PORT", std::to_string(reserved.port()));
      set("OMP_NUM_THREADS", "1");
      unsetenv("GLOO_SOCKET_IFNAME");
      if (rank == 0 && options.reserve_port) {
        set("DDP_MASTER_LISTEN_FD", std::to_string(reserved.fd()));
      } else {
        close(reserved.fd());
      }
      for (const auto& [name, value] : options.environment) {
        set(name.c_str(), value);
      }
      // No return into the test runner, and no destructors of its statics.
      std::fflush(nullptr);
      const int status = run_body(Rank(rank, world_size, ends[1]), body);
      std::fflush(nullptr);
      std::exit(status);
    }
    close(ends[1]);
    fcntl(ends[0], F_SETFL, O_NONBLOCK);
    processes[rank].pid = pid;
    processes[rank].pipe = ends[0];
  }
  const auto deadline = start + options.limit;
  std::size_t running = processes.size();
  while (running > 0) {
    std::vector<pollfd> polled;
    for (const auto& process : processes) {
      polled.push_back({process.ended ? -1 : process.pipe, POLLIN, 0});
    }
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) {
      break;
    }
    poll(polled.data(), polled.size(), static_cast<int>(left));
    for (int rank = 0; rank < world_size; ++rank) {
      auto& process = processes[rank];
      if (process.ended || polled[rank].revents == 0) {
        continue;
      }
      char chunk[65536];
      ssize_t count = 0;
      while ((count = read(process.pipe, chunk, sizeof(chunk))) > 0) {
        process.unread.append(chunk, static_cast<std::size_t>(count));
      }
      take_messages(process, results[rank], [&](const std::string& name) {
        results[rank].arrived[name] = seconds_since_start();
        for (const auto& trigger : triggers) {
          if (trigger.rank == rank && trigger.name == name) {
            trigger.act(process.pid);
          }
        }
      });
      if (count == 0) {
        // End of file: the process has ended, or is about to.
        int status = 0;
        waitpid(process.pid, &status, 0);
        process.ended = true;
        --running;
        results[rank].status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
        results[rank].seconds = seconds_since_start();
      }
    }
  }
  for (int rank = 0; rank < world_size; ++rank) {
    if (!processes[rank].ended) {
      kill(processes[rank].pid, SIGKILL);
      waitpid(processes[rank].pid, nullptr, 0);
      results[rank].status = -1;
      results[rank].seconds = seconds_since_start();
    }
    close(processes[rank].pipe);
  }
  return results;
}

std::string backend() {
  const char* const asked = std::getenv("DDP_TEST_BACKEND");
  return asked != nullptr ? asked : "gloo";
}

std::string summary(const std::vector<RankResult>& results) {
  std::string text;
  for (std::size_t rank = 0; rank < results.size(); ++rank) {
    const auto& result = results[rank];
    text += "\nrank " + std::to_string(rank) + ": status " + std::to_string(result.status) +
            " after " + std::to_string(result.seconds) + " s " + result.error_type + " " +
            result.error;
    for (const auto& [name, value] : result.values) {
      text += "\n    " + name + " = " + value;
    }
  }
  return text;
}

}  // namespace ddp::test
