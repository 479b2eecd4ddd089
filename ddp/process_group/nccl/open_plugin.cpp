#include <atomic>
#include <climits>
#include <cstring>
#include <dlfcn.h>
#include <optional>
#include <unistd.h>

#include <fmt/format.h>

#include <ddp/error.h>
#include <ddp/process_group/environment.h>
#include <ddp/process_group/nccl/open_plugin.h>

namespace ddp::detail {
namespace {

constexpr const char* kFile = "libddp_nccl.so";
constexpr const char* kVariable = "DDP_NCCL_PLUGIN";

std::atomic<const NcclPlugin*> opened{nullptr};

std::string folder_of(const std::string& path) { return path.substr(0, path.rfind('/')); }

std::string program_folder() {
  char path[PATH_MAX];
  const auto size = readlink("/proc/self/exe", path, sizeof(path));
  return folder_of(std::string(path, size > 0 ? static_cast<std::size_t>(size) : 0));
}

std::string own_folder() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&program_folder), &info) == 0 ||
      std::strchr(info.dli_fname, '/') == nullptr) {
    return program_folder();
  }
  return folder_of(info.dli_fname);
}

bool is_linked() { return dlsym(RTLD_DEFAULT, kNcclPluginName) != nullptr; }

std::optional<std::string> find_file() {
  if (const auto given = environment(kVariable)) {
    return access(given->c_str(), R_OK) == 0 ? given : std::nullopt;
  }
  const auto here = own_folder();
  const auto program = program_folder();
  for (const auto& folder : {here, program, program + "/../lib", program + "/../lib64"}) {
    const auto path = fmt::format("{}/{}", folder, kFile);
    if (access(path.c_str(), R_OK) == 0) {
      return path;
    }
  }
  return std::nullopt;
}

void* open_file(const std::string& who) {
  const auto path = find_file();
  if (!path) {
    const auto given = environment(kVariable);
    throw UsageError(
        given ? fmt::format("{}{}={}: there is no such file; it names ddp's NCCL plug-in, {}", who,
                            kVariable, *given, kFile)
              : fmt::format("{}this ddp was built without NCCL: {} is not in {}. Build it with a "
                            "LibTorch that has CUDA and with -DDDP_WITH_NCCL=ON, which says what "
                            "is missing, or name the file in {}",
                            who, kFile, own_folder(), kVariable));
  }
  // Global, so that a program's own CUDA code and this share LibTorch's CUDA half.
  void* const library = dlopen(path->c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) {
    throw UsageError(
        fmt::format("{}{} could not be loaded: {}. It needs LibTorch's CUDA half and CUDA's "
                    "libraries (scripts/bootstrap.sh without --minimal brings them; "
                    "LD_LIBRARY_PATH names others)",
                    who, *path, dlerror()));
  }
  return library;
}

}  // namespace

bool nccl_plugin_exists() {
  // A file that was named and is missing is an error, not a machine without NCCL.
  return is_linked() || environment(kVariable) || find_file();
}

const NcclPlugin& open_nccl_plugin(const std::string& who) {
  if (const auto* plugin = opened.load()) {
    return *plugin;
  }
  void* const library = is_linked() ? RTLD_DEFAULT : open_file(who);
  const auto build =
      reinterpret_cast<NcclPluginBuildFunction>(dlsym(library, kNcclPluginBuildName));
  const auto plugin = reinterpret_cast<NcclPluginFunction>(dlsym(library, kNcclPluginName));
  if (build == nullptr || plugin == nullptr || std::strcmp(build(), kNcclPluginBuild) != 0) {
    throw UsageError(fmt::format(
        "{}the NCCL plug-in belongs to another build of ddp ({}; this one is {}): install both "
        "from one build",
        who, build != nullptr ? build() : "unknown", kNcclPluginBuild));
  }
  opened = plugin();
  return *opened.load();
}

bool is_capturing_graph() {
  const auto* plugin = opened.load();
  return plugin != nullptr && plugin->is_capturing();
}

}  // namespace ddp::detail
