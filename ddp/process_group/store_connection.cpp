#include <future>
#include <thread>

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <ddp/error_text.h>
#include <ddp/process_group/store_connection.h>
#include <ddp/process_group/store_sockets.h>

namespace ddp::detail {

StoreFailure store_failure(const std::exception& error) {
  using Kind = StoreFailure::Kind;
  if (const auto* known = dynamic_cast<const StoreFailure*>(&error)) {
    return *known;
  }
  if (dynamic_cast<const c10::DistNetworkError*>(&error) != nullptr) {
    return {Kind::kClosed,
            "the store's connection is closed: the process that serves it has ended"};
  }
  const auto text = concise(error);
  // TCPStore, HashStore and FileStore each have their own words for it.
  const bool timeout =
      text.find("imeout") != std::string::npos || text.find("imed out") != std::string::npos;
  return {timeout ? Kind::kTimeout : Kind::kOther, text};
}

StoreConnection::StoreConnection(const c10::intrusive_ptr<c10d::Store>& store) {
  const auto port = tcp_port_of(store);
  const auto before = port ? connections_toward(*port) : Connections{};
  store_ = store->clone();
  if (port) {
    connections_ = opened_since(before, connections_toward(*port));
  }
}

StoreConnection::~StoreConnection() {
  std::unique_lock lock(threads_->mutex);
  if (threads_->count > 0) {
    shut_down(connections_);
    threads_->ended.wait_for(lock, std::chrono::seconds(1),
                             [this] { return threads_->count == 0; });
  }
}

std::string StoreConnection::call(std::chrono::milliseconds limit, const Task& task) {
  std::promise<std::string> promise;
  auto result = promise.get_future();
  {
    const std::lock_guard lock(threads_->mutex);
    ++threads_->count;
  }
  std::thread([store = store_, threads = threads_, task, promise = std::move(promise)]() mutable {
    try {
      promise.set_value(task(*store));
    } catch (...) {
      promise.set_exception(std::current_exception());
    }
    store.reset();
    const std::lock_guard lock(threads->mutex);
    --threads->count;
    threads->ended.notify_all();
  }).detach();
  if (result.wait_for(limit) != std::future_status::ready) {
    throw StoreFailure(StoreFailure::Kind::kSilent,
                       "the process that serves the store does not answer: it is stopped, or its "
                       "machine is cut off");
  }
  try {
    return result.get();
  } catch (const std::exception& error) {
    throw store_failure(error);
  }
}

}  // namespace ddp::detail
