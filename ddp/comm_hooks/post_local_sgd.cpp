#include <memory>
#include <numeric>
#include <vector>

#include <ATen/ATen.h>

#include <ddp/comm_hooks/hook_collectives.h>
#include <ddp/comm_hooks/post_local_sgd.h>

namespace ddp::comm_hooks {
namespace {

ProcessGroup group_of_node() {
  std::vector<int> ranks(static_cast<std::size_t>(local_world_size()));
  std::iota(ranks.begin(), ranks.end(), get_rank() - local_rank());
  return new_group(ranks);
}

}  // namespace

CommHook post_local_sgd(const PostLocalSGDOptions& options) {
  const auto group = detail::hook_group(options.process_group());
  ProcessGroup subgroup;
  if (options.post_local_gradient_allreduce()) {
    subgroup = options.subgroup() ? detail::hook_group(options.subgroup()) : group_of_node();
  }
  const auto step = std::make_shared<std::int64_t>(0);
  return [group, subgroup, step, start = options.start_local_sgd_iter()](c10d::GradBucket& bucket) {
    if (*step < start) {
      if (bucket.isLast()) {
        ++*step;
      }
      return detail::start_average(group, bucket.getBuffer());
    }
    return subgroup ? detail::start_average(subgroup, bucket.getBuffer())
                    : detail::completed(bucket.getBuffer());
  };
}

}  // namespace ddp::comm_hooks
