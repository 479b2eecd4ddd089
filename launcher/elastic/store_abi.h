#pragma once

#include <cstddef>
#include <cstdint>

/// What the plug-in library of the elastic rendezvous' store offers to the launcher, which opens it
/// by dlopen: C types alone, so that both may have a C++ library of their own. The library exports
/// one function, `ddp_rendezvous_store_api`.
///
/// No function throws or ends the process. A call may wait for the peer without bound (LibTorch's
/// client does), so the caller bounds it. A store is used by one thread.
extern "C" {

struct ddp_store;

enum ddp_store_result {
  DDP_STORE_OK = 0,
  DDP_STORE_ERROR = 1,    ///< see last_error
  DDP_STORE_MISSING = 2,  ///< there is no such key
  DDP_STORE_TIMEOUT = 3,
  DDP_STORE_IN_USE = 4,  ///< open: somebody else has the port
};

/// Bytes that the store gave; to be given back with `release`.
struct ddp_store_bytes {
  char* data;
  size_t size;
};

struct ddp_store_api {
  int version;  ///< kDdpStoreApiVersion

  /// Serves a store on `port` of all this machine's addresses, or joins the one at `host`.
  int (*serve)(uint16_t port, int64_t timeout_ms, ddp_store** store);
  int (*join)(const char* host, uint16_t port, int64_t timeout_ms, ddp_store** store);
  void (*close)(ddp_store* store);

  int (*get)(ddp_store* store, const char* key, ddp_store_bytes* value);
  int (*set)(ddp_store* store, const char* key, const char* value, size_t size);
  /// Writes `desired` where the key has `expected` (empty: or is missing); `now` is what it has
  /// then.
  int (*compare_set)(ddp_store* store, const char* key, const char* expected, size_t expected_size,
                     const char* desired, size_t desired_size, ddp_store_bytes* now);
  /// A counter that begins at 0; `now` is what it has then.
  int (*add)(ddp_store* store, const char* key, int64_t amount, int64_t* now);
  /// Until there is such a key.
  int (*wait)(ddp_store* store, const char* key, int64_t timeout_ms);
  int (*check)(ddp_store* store, const char* key);
  int (*erase)(ddp_store* store, const char* key);

  void (*release)(ddp_store_bytes bytes);
  /// Of the last call that gave DDP_STORE_ERROR, one line; valid until the next call.
  const char* (*last_error)();
};

using ddp_rendezvous_store_api_function = const ddp_store_api* (*)();
}

inline constexpr int kDdpStoreApiVersion = 1;
inline constexpr const char* kDdpStoreApiName = "ddp_rendezvous_store_api";
