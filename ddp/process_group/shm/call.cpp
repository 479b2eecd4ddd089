#include <fmt/format.h>

#include <ddp/process_group/shm/call.h>

namespace ddp::shm {
namespace {

const char* name_of(Kind kind) {
  constexpr const char* kNames[] = {"all_reduce", "broadcast",      "reduce",
                                    "all_gather", "reduce_scatter", "barrier"};
  return kNames[static_cast<int>(kind)];
}

bool combines(Kind kind) {
  return kind == Kind::kAllReduce || kind == Kind::kReduce || kind == Kind::kReduceScatter;
}

bool has_root(Kind kind) { return kind == Kind::kBroadcast || kind == Kind::kReduce; }

}  // namespace

std::string describe(const Announcement& call) {
  std::string text = name_of(call.kind);
  if (call.kind == Kind::kBarrier) {
    return text;
  }
  if (combines(call.kind)) {
    text += std::string("(") + name_of(call.op) + ")";
  }
  if (has_root(call.kind)) {
    text +=
        (call.kind == Kind::kBroadcast ? " from rank " : " to rank ") + std::to_string(call.root);
  }
  return call.type == DataType::kOther
             ? fmt::format("{} of {} bytes", text, call.count)
             : fmt::format("{} of {} elements ({})", text, call.count, name_of(call.type));
}

bool fits(const Announcement& one, const Announcement& other) {
  return one.kind == other.kind && one.type == other.type && one.count == other.count &&
         (one.op == other.op || !combines(one.kind)) &&
         (one.root == other.root || !has_root(one.kind));
}

}  // namespace ddp::shm
