#pragma once

#include <functional>
#include <type_traits>

namespace ddp {

namespace detail {
int record_errors(const std::function<int()>& body);
}  // namespace detail

/// Runs a program's `body` and lets the launcher know why it failed, as Python's
/// `torch.distributed.elastic.multiprocessing.errors.record` does:
///
///     int main(int argc, char** argv) {
///       return ddp::record_errors([&] { return train(argc, argv); });
///     }
///
/// Returns what `body` returns (0 where that is nothing). An exception that `body` lets out is
/// printed to standard error, after the program's name and the rank, is written to the file that
/// TORCHELASTIC_ERROR_FILE names, and becomes the return value 1: the launcher shows it as the root
/// cause, and so does torchrun. Without that variable it is only printed. While `body` runs, an
/// exception that ends the process otherwise (in a thread of the program's own, or out of a
/// destructor) is written there as well, before it does.
///
/// The file has the JSON that `record` writes, {"message": {"message": "TYPE: TEXT", "extraInfo":
/// {"timestamp": SECONDS}}}, with the call stack of LibTorch's errors as "py_callstack" and with
/// the microseconds since 1970 as "timestamp_us", by which the launcher finds out who failed first.
///
/// Once in a process, around all of `main`; not thread-safe, since it sets the process's terminate
/// handler. Throws nothing.
template <class Body>
int record_errors(Body&& body) {
  return detail::record_errors([&]() -> int {
    if constexpr (std::is_void_v<std::invoke_result_t<Body&>>) {
      body();
      return 0;
    } else {
      return body();
    }
  });
}

}  // namespace ddp
