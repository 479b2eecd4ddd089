#include <ATen/ATen.h>
#include <fmt/format.h>

#include <ddp/error.h>
#include <ddp/reducer/reducer.h>
#include <ddp/reducer/watched_wait.h>

// The reducer's failures: what is said of them, and what they leave behind.

// Note [A failed pass]
// ~~~~~~~~~~~~~~~~~~~~
// What is begun on the wire is ended on the wire. A pass may die on every rank alike (a layer that
// no rank used) or on one of them (an exception there). The dying rank says so over the failure
// channel and waits shortly for the same word from the others. If all of them failed this pass,
// each completes the buckets that are not launched yet, throws the values away, and the next pass
// is clean. Otherwise the rank leaves the group: it publishes why and closes its connections, so
// that its peers, which wait for its part of a bucket, end with an error that carries its words
// instead of waiting for a timeout or averaging with something else.

namespace ddp {
namespace {

// How long a rank whose pass died waits to hear that it died everywhere. Peers of a single dying
// rank hang for as long as this.
constexpr std::chrono::milliseconds kFailurePatience(2000);

}  // namespace

std::string Reducer::describe(std::size_t bucket) const {
  const auto& indices = buckets_[bucket].indices();
  if (indices.size() == 1) {
    return fmt::format("bucket {} of {} ({})", bucket, buckets_.size(),
                       parameters_[indices.front()].name);
  }
  return fmt::format("bucket {} of {} ({} ... {}, {} parameters)", bucket, buckets_.size(),
                     parameters_[indices.front()].name, parameters_[indices.back()].name,
                     indices.size());
}

std::string Reducer::describe_missing() const {
  constexpr std::size_t kShown = 20;
  std::string text;
  std::size_t count = 0;
  for (std::size_t index = 0; index < parameters_.size(); ++index) {
    if (ready_[index] != 0) {
      continue;
    }
    if (++count <= kShown) {
      const auto& parameter = parameters_[index];
      text += fmt::format(
          "\n  {}{}", parameter.name,
          parameter.tensor.requires_grad() ? "" : " (it does not require a gradient any more)");
    }
  }
  if (count > kShown) {
    text += fmt::format("\n  and {} more", count - kShown);
  }
  return text;
}

void Reducer::communication_failed(const std::string& what, const std::string& why) {
  communication_failed(fmt::format("{} failed: {}", what, why));
}

void Reducer::communication_failed(const std::string& report) {
  drop_gradients();
  if (open_) {
    close_pass();
  }
  failure_ = fmt::format(
      "the process group failed earlier ({}); destroy it with ddp::destroy_process_group()",
      report);
  std::string others;
  if (channel_) {
    channel_->abort(who() + report);
    others = channel_->reports_of_others(kReportPatience);
  } else {
    process_group_->abort();
  }
  throw CommunicationError(who() + report + others);
}

/// Of all-reduces that a stream has waited for: throws where one is known by now to have failed.
void Reducer::check_device_works() {
  if (const auto failed = device_works_.failure()) {
    communication_failed(*failed);
  }
}

void Reducer::refuse_capture(const std::string& what) {
  if (options_.is_capturing && options_.is_capturing()) {
    if (open_) {
      drop_gradients();
      close_pass();
    }
    throw UsageError(fmt::format(
        "{}this step is being captured into a CUDA graph, and must learn {}, which a graph cannot "
        "do. Run at least three steps before the capture, in which every parameter is used",
        who(), what));
  }
}

void Reducer::drop_gradients() {
  for (auto& bucket : buckets_) {
    bucket.drop_gradients(parameters_);
  }
}

bool Reducer::fail_pass(const std::string& report) noexcept {
  bool is_clean = failure_.empty();
  try {
    // A hook cannot be asked to communicate what it has just refused.
    is_clean = is_clean && !(hook_ && next_bucket_ < buckets_.size()) && channel_ &&
               channel_->all_failed(scope_, pass_, report, kFailurePatience);
    if (is_clean) {
      complete_on_the_wire();
    }
  } catch (const std::exception&) {
    is_clean = false;
  }
  if (!is_clean && failure_.empty()) {
    failure_ =
        "this rank left the process group after a failed backward pass; destroy it with "
        "ddp::destroy_process_group(). The pass failed with: " +
        report;
    if (channel_) {
      channel_->abort(report);
      channel_->await_readers(kReportPatience);
    } else {
      try {
        process_group_->abort();
      } catch (const std::exception&) {
        // A backend that cannot be aborted ends with the process.
      }
    }
  }
  drop_gradients();
  close_pass();
  return is_clean;
}

void Reducer::complete_on_the_wire() {
  for (; next_bucket_ < buckets_.size(); ++next_bucket_) {
    in_flight_[next_bucket_].work = start_all_reduce(next_bucket_);
  }
  for (std::size_t index = 0; index < in_flight_.size(); ++index) {
    auto& in_flight = in_flight_[index];
    if (in_flight.future) {
      detail::watched_wait(*in_flight.future, channel_.get());
    } else if (in_flight.work) {
      detail::watched_wait(*in_flight.work, channel_.get(), buckets_[index].wait_kind);
    }
  }
}

void Reducer::backward_died(std::uint64_t pass) {
  const std::lock_guard lock(mutex_);
  if (!open_ || pass != pass_) {
    return;
  }
  fail_pass(pending_report_.empty() ? who() + "an exception ended its backward pass"
                                    : pending_report_);
}

}  // namespace ddp
