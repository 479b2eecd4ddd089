#include <dlfcn.h>
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>

#include <fmt/format.h>

#include <launcher/gpus.h>
#include <launcher/unique_fd.h>

namespace ddp::launcher {
namespace {

constexpr int kNoDevice = 100;  // CUDA_ERROR_NO_DEVICE

template <typename Function>
Function symbol(void* library, const char* name) {
  return reinterpret_cast<Function>(::dlsym(library, name));
}

/// One line for each GPU, or one that begins with '!' and says why there are none.
std::string ask_driver() {
  void* library = ::dlopen("libcuda.so.1", RTLD_NOW);
  if (library == nullptr) return "!no NVIDIA driver on this machine (libcuda.so.1 was not found)\n";
  const auto init = symbol<int (*)(unsigned)>(library, "cuInit");
  const auto get_count = symbol<int (*)(int*)>(library, "cuDeviceGetCount");
  const auto get_address = symbol<int (*)(char*, int, int)>(library, "cuDeviceGetPCIBusId");
  if (init == nullptr || get_count == nullptr || get_address == nullptr)
    return "!libcuda.so.1 is not the driver's library\n";
  int count = 0;
  int error = init(0);
  if (error == 0) error = get_count(&count);
  if (error == kNoDevice || (error == 0 && count == 0))
    return "!no GPU is visible (see nvidia-smi, and CUDA_VISIBLE_DEVICES)\n";
  if (error != 0) return fmt::format("!the NVIDIA driver gives error {} (see nvidia-smi)\n", error);
  std::string lines;
  for (int device = 0; device < count; ++device) {
    char address[32] = "";
    if (get_address(address, sizeof(address), device) != 0) address[0] = '\0';
    lines.append(address).push_back('\n');
  }
  return lines;
}

}  // namespace

Gpus find_gpus() {
  Gpus gpus;
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) {
    gpus.error = fmt::format("cannot make a pipe: {}", std::strerror(errno));
    return gpus;
  }
  UniqueFd out(ends[0]);
  UniqueFd in(ends[1]);
  const pid_t pid = ::fork();
  if (pid == 0) {
    const std::string lines = ask_driver();
    const bool written =
        ::write(in.get(), lines.data(), lines.size()) == static_cast<ssize_t>(lines.size());
    ::_exit(written ? 0 : 1);
  }
  in.reset();
  std::string lines;
  char part[4096];
  while (true) {
    const ssize_t size = ::read(out.get(), part, sizeof(part));
    if (size < 0 && errno == EINTR) continue;
    if (size <= 0) break;
    lines.append(part, static_cast<size_t>(size));
  }
  if (pid > 0) ::waitpid(pid, nullptr, 0);
  if (lines.empty()) {
    gpus.error = "asking the NVIDIA driver failed (see nvidia-smi)";
  } else if (lines.substr(0, 1) == "!") {
    gpus.error = lines.substr(1, lines.find('\n') - 1);
  } else {
    for (size_t begin = 0; begin < lines.size();) {
      const auto end = lines.find('\n', begin);
      std::string address = lines.substr(begin, end - begin);
      std::transform(address.begin(), address.end(), address.begin(),
                     [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
      gpus.pci_addresses.push_back(address);
      begin = end + 1;
    }
  }
  return gpus;
}

}  // namespace ddp::launcher
