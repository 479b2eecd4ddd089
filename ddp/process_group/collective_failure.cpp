#include <fmt/format.h>

#include <ddp/error.h>
#include <ddp/process_group/collective_failure.h>

namespace ddp::detail {

void fail_collective(StoreChannel& channel, const std::string& name, const std::string& why) {
  const auto text =
      fmt::format("rank {} of {}: {} failed: {}", channel.rank(), channel.world_size(), name, why);
  channel.abort(text);
  throw CommunicationError(text + channel.reports_of_others(kReportPatience));
}

}  // namespace ddp::detail
