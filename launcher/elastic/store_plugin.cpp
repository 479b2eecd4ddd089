#include <dlfcn.h>
#include <unistd.h>

#include <climits>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include <launcher/elastic/store_plugin.h>
#include <launcher/error.h>

namespace ddp::launcher {
namespace {

constexpr const char* kVariable = "DDP_RENDEZVOUS_STORE";
constexpr const char* kName = "libddp_rendezvous_store.so";
constexpr const char* kRemedy =
    "Build and install ddp with its library part (DDP_BUILD_LIBRARY=ON, needs LibTorch) and name "
    "the file in DDP_RENDEZVOUS_STORE, or use the static rendezvous: --nnodes=N --node_rank=I "
    "--master_addr=HOST on each node.";

std::string own_folder() {
  char path[PATH_MAX];
  const ssize_t size = ::readlink("/proc/self/exe", path, sizeof(path));
  const std::string_view whole(path, size > 0 ? static_cast<size_t>(size) : 0);
  return std::string(whole.substr(0, whole.rfind('/')));
}

class PluginStore final : public Store {
 public:
  PluginStore(const ddp_store_api* api, ddp_store* store) : api_(api), store_(store) {}
  ~PluginStore() override { api_->close(store_); }

  std::optional<std::string> get(const std::string& key) override {
    ddp_store_bytes value{};
    if (checked(api_->get(store_, key.c_str(), &value)) == DDP_STORE_MISSING) return {};
    return take(value);
  }

  void set(const std::string& key, const std::string& value) override {
    checked(api_->set(store_, key.c_str(), value.data(), value.size()));
  }

  std::string compare_set(const std::string& key, const std::string& expected,
                          const std::string& desired) override {
    ddp_store_bytes now{};
    checked(api_->compare_set(store_, key.c_str(), expected.data(), expected.size(), desired.data(),
                              desired.size(), &now));
    return take(now);
  }

  int64_t add(const std::string& key, int64_t amount) override {
    int64_t now = 0;
    checked(api_->add(store_, key.c_str(), amount, &now));
    return now;
  }

  bool wait(const std::string& key, std::chrono::milliseconds time) override {
    const int result = api_->wait(store_, key.c_str(), time.count());
    if (result != DDP_STORE_TIMEOUT) checked(result);
    return result == DDP_STORE_OK;
  }

  void erase(const std::string& key) override { checked(api_->erase(store_, key.c_str())); }

 private:
  int checked(int result) const {
    if (result != DDP_STORE_OK && result != DDP_STORE_MISSING) throw StoreError(api_->last_error());
    return result;
  }

  std::string take(ddp_store_bytes bytes) const {
    std::string text(bytes.data, bytes.size);
    api_->release(bytes);
    return text;
  }

  const ddp_store_api* api_;
  ddp_store* store_;
};

}  // namespace

std::string find_store_plugin(const VariableLookup& variables) {
  const char* given = variables(kVariable);
  if (given != nullptr && *given != '\0') {
    if (::access(given, R_OK) == 0) return given;
    throw Error(ExitStatus::kSetup,
                fmt::format("{}={}: no such file\n{}", kVariable, given, kRemedy));
  }
  const std::string here = own_folder();
  for (const std::string& folder : {here, here + "/../lib", here + "/../" DDP_LIBDIR}) {
    const std::string path = fmt::format("{}/{}", folder, kName);
    if (::access(path.c_str(), R_OK) == 0) return path;
  }
  throw Error(
      ExitStatus::kSetup,
      fmt::format("the c10d rendezvous of several nodes needs {}, which is neither in {} nor "
                  "in the library folder beside it\n{}",
                  kName, here, kRemedy));
}

StorePlugin::StorePlugin(const std::string& path) {
  void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr)
    throw Error(ExitStatus::kSetup, fmt::format("cannot open {}\n{}", ::dlerror(), kRemedy));
  const auto get_api =
      reinterpret_cast<ddp_rendezvous_store_api_function>(::dlsym(library, kDdpStoreApiName));
  api_ = get_api != nullptr ? get_api() : nullptr;
  if (api_ == nullptr || api_->version != kDdpStoreApiVersion) {
    throw Error(ExitStatus::kSetup,
                fmt::format("{} belongs to another version of the launcher\n{}", path, kRemedy));
  }
}

std::unique_ptr<Store> StorePlugin::serve(uint16_t port, std::chrono::milliseconds timeout) const {
  ddp_store* store = nullptr;
  const int result = api_->serve(port, timeout.count(), &store);
  if (result == DDP_STORE_IN_USE) return nullptr;
  if (result != DDP_STORE_OK) throw StoreError(api_->last_error());
  return std::make_unique<PluginStore>(api_, store);
}

std::unique_ptr<Store> StorePlugin::join(const std::string& host, uint16_t port,
                                         std::chrono::milliseconds timeout) const {
  ddp_store* store = nullptr;
  if (api_->join(host.c_str(), port, timeout.count(), &store) != DDP_STORE_OK)
    throw StoreError(api_->last_error());
  return std::make_unique<PluginStore>(api_, store);
}

}  // namespace ddp::launcher
