// The store of the elastic rendezvous: LibTorch's TCPStore behind launcher/elastic/store_abi.h.

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>

#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

#include <launcher/elastic/store_abi.h>

struct ddp_store {
  c10::intrusive_ptr<c10d::TCPStore> tcp;
};

namespace {

using std::chrono::milliseconds;

std::string& error_text() {
  thread_local std::string text;
  return text;
}

bool contains(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

/// Runs `body`; what it throws becomes a result.
template <typename Body>
int guarded(const Body& body) {
  std::string text;
  try {
    return body();
  } catch (const c10::Error& error) {
    text = error.what_without_backtrace();
  } catch (const std::exception& error) {
    text = error.what();
  } catch (...) {
    text = "an unknown exception";
  }
  error_text() = text.substr(0, text.find('\n'));
  if (contains(text, "EADDRINUSE") || contains(text, "already in use")) return DDP_STORE_IN_USE;
  if (contains(text, "timeout") || contains(text, "timed out")) return DDP_STORE_TIMEOUT;
  return DDP_STORE_ERROR;
}

std::vector<uint8_t> bytes(const char* data, size_t size) { return {data, data + size}; }

ddp_store_bytes give(const std::vector<uint8_t>& value) {
  auto* data = static_cast<char*>(std::malloc(value.size() + 1));
  if (data == nullptr) throw std::bad_alloc();
  if (!value.empty()) std::memcpy(data, value.data(), value.size());
  return {data, value.size()};
}

int open(const char* host, uint16_t port, int64_t timeout_ms, bool serving, ddp_store** store) {
  return guarded([&] {
    c10d::TCPStoreOptions options;
    options.port = port;
    options.isServer = serving;
    options.waitWorkers = false;
    options.timeout = milliseconds(timeout_ms);
    *store = new ddp_store{c10::make_intrusive<c10d::TCPStore>(host, options)};
    return DDP_STORE_OK;
  });
}

int serve(uint16_t port, int64_t timeout_ms, ddp_store** store) {
  return open("localhost", port, timeout_ms, /*serving=*/true, store);
}

int join(const char* host, uint16_t port, int64_t timeout_ms, ddp_store** store) {
  return open(host, port, timeout_ms, /*serving=*/false, store);
}

void close(ddp_store* store) { delete store; }

int check(ddp_store* store, const char* key) {
  return guarded([&] { return store->tcp->check({key}) ? DDP_STORE_OK : DDP_STORE_MISSING; });
}

int get(ddp_store* store, const char* key, ddp_store_bytes* value) {
  return guarded([&] {
    // A get of what is not there would wait for it.
    if (!store->tcp->check({key})) return DDP_STORE_MISSING;
    *value = give(store->tcp->get(key));
    return DDP_STORE_OK;
  });
}

int set(ddp_store* store, const char* key, const char* value, size_t size) {
  return guarded([&] {
    store->tcp->set(key, bytes(value, size));
    return DDP_STORE_OK;
  });
}

int compare_set(ddp_store* store, const char* key, const char* expected, size_t expected_size,
                const char* desired, size_t desired_size, ddp_store_bytes* now) {
  return guarded([&] {
    *now = give(
        store->tcp->compareSet(key, bytes(expected, expected_size), bytes(desired, desired_size)));
    return DDP_STORE_OK;
  });
}

int add(ddp_store* store, const char* key, int64_t amount, int64_t* now) {
  return guarded([&] {
    *now = store->tcp->add(key, amount);
    return DDP_STORE_OK;
  });
}

int wait(ddp_store* store, const char* key, int64_t timeout_ms) {
  return guarded([&] {
    store->tcp->wait({key}, milliseconds(timeout_ms));
    return DDP_STORE_OK;
  });
}

int erase(ddp_store* store, const char* key) {
  return guarded([&] { return store->tcp->deleteKey(key) ? DDP_STORE_OK : DDP_STORE_MISSING; });
}

void release(ddp_store_bytes given) { std::free(given.data); }

const char* last_error() { return error_text().c_str(); }

constexpr ddp_store_api kApi = {
    kDdpStoreApiVersion, serve, join, close, get,   set,
    compare_set,         add,   wait, check, erase, release,
    last_error,
};

}  // namespace

extern "C" __attribute__((visibility("default"))) const ddp_store_api* ddp_rendezvous_store_api() {
  c10::initLogging();  // reads TORCH_CPP_LOG_LEVEL, which nobody else does in a C++ program
  return &kApi;
}
