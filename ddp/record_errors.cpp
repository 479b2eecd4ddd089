#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cxxabi.h>
#include <errno.h>  // program_invocation_short_name
#include <exception>
#include <fcntl.h>
#include <string>
#include <string_view>
#include <typeinfo>
#include <unistd.h>

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <ddp/json_quoted.h>
#include <ddp/process_group/environment.h>
#include <ddp/record_errors.h>

namespace ddp::detail {
namespace {

constexpr const char* kErrorFile = "TORCHELASTIC_ERROR_FILE";

struct Failure {
  std::string type;   ///< of the exception
  std::string text;   ///< its words
  std::string stack;  ///< empty: it has none

  std::string whole() const { return type.empty() ? text : fmt::format("{}: {}", type, text); }
};

std::string demangled(const std::type_info* type) {
  if (type == nullptr) return {};
  int status = 0;
  char* name = abi::__cxa_demangle(type->name(), nullptr, nullptr, &status);
  std::string result = name != nullptr ? name : type->name();
  std::free(name);
  return result;
}

Failure describe(const std::exception& error) {
  Failure failure{demangled(&typeid(error)), error.what(), ""};
  if (const auto* known = dynamic_cast<const c10::Error*>(&error)) {
    const std::string_view words = known->what_without_backtrace();
    if (failure.text.starts_with(words)) failure.stack = failure.text.substr(words.size());
    failure.text = words;
  }
  while (failure.text.ends_with('\n')) failure.text.pop_back();
  try {
    std::rethrow_if_nested(error);
  } catch (const std::exception& cause) {
    failure.text += fmt::format("\nbecause of {}", describe(cause).whole());
  } catch (...) {
  }
  return failure;
}

/// Of the exception that is being handled.
Failure describe_current() {
  try {
    throw;
  } catch (const std::exception& error) {
    return describe(error);
  } catch (...) {
    const std::string type = demangled(abi::__cxa_current_exception_type());
    return {type, "an exception that is not a std::exception", ""};
  }
}

/// As torch's @record has it. A Python call stack ends with the error, and who shows it may cut off
/// its beginning: so does ours.
std::string as_json(const Failure& failure) {
  using std::chrono::microseconds;
  const auto now =
      std::chrono::duration_cast<microseconds>(std::chrono::system_clock::now().time_since_epoch())
          .count();
  std::string stack;
  if (!failure.stack.empty()) {
    stack = fmt::format("\"py_callstack\": {}, ",
                        json_quoted(fmt::format("{}\n{}", failure.stack, failure.whole())));
  }
  return fmt::format(
      "{{\"message\": {{\"message\": {}, \"extraInfo\": {{{}\"timestamp\": \"{}\", "
      "\"timestamp_us\": \"{}\"}}}}}}",
      json_quoted(failure.whole()), stack, now / 1000000, now);
}

/// The first failure alone: what a thread or a destructor comes to later is mostly its consequence.
std::atomic<bool> is_recorded{false};

void write_error_file(const Failure& failure) {
  const auto path = environment(kErrorFile);
  if (!path || is_recorded.exchange(true)) return;
  const std::string json = as_json(failure);
  const int fd = ::open(path->c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  std::size_t written = 0;
  while (fd >= 0 && written < json.size()) {
    const ssize_t count = ::write(fd, json.data() + written, json.size() - written);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) break;
    written += static_cast<std::size_t>(count);
  }
  if (written < json.size()) {
    std::fprintf(stderr, "the error could not be written to %s, the file of %s: %s\n",
                 path->c_str(), kErrorFile, std::strerror(errno));
  }
  if (fd >= 0) ::close(fd);
}

void print(const Failure& failure) {
  std::string who = fmt::format("{}: ", program_invocation_short_name);
  const auto rank = environment("RANK");  // known also before there is a group
  if (rank && !failure.text.starts_with("rank ")) who += fmt::format("rank {}: ", *rank);
  std::fprintf(stderr, "%s%s\n", who.c_str(), failure.text.c_str());
}

std::terminate_handler previous_handler = nullptr;

[[noreturn]] void record_and_terminate() {
  try {
    write_error_file(std::current_exception()
                         ? describe_current()
                         : Failure{"", "std::terminate was called without an exception", ""});
  } catch (...) {  // out of memory: what comes next is the same
  }
  // The previous one says it on standard error.
  if (previous_handler != nullptr) previous_handler();
  std::abort();
}

/// For as long as it lives an exception that nobody catches is recorded.
class TerminateHandler {
 public:
  TerminateHandler() { previous_handler = std::set_terminate(record_and_terminate); }
  ~TerminateHandler() { std::set_terminate(previous_handler); }
  TerminateHandler(const TerminateHandler&) = delete;
  TerminateHandler& operator=(const TerminateHandler&) = delete;
};

}  // namespace

int record_errors(const std::function<int()>& body) {
  is_recorded = false;
  const TerminateHandler handler;
  try {
    return body();
  } catch (const abi::__forced_unwind&) {  // a cancelled thread: not to be held up
    throw;
  } catch (...) {
    const Failure failure = describe_current();
    print(failure);
    write_error_file(failure);
    return 1;
  }
}

}  // namespace ddp::detail
