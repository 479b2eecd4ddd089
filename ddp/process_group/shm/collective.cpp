#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include <ddp/process_group/shm/collective.h>
#include <ddp/process_group/shm/shm_error.h>

// Note [Collectives over shared memory]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A call begins with its announcement in the rank's mailbox, and a step. When all ranks have made
// it, each has all announcements before it, and they all find the same way for the message:
//
// - Through the mailboxes, where it is small. It lies beside the announcement already; each rank
//   combines all of it for itself, and is done with this one step.
// - Directly, where all ranks' tensors lie in their shared memory (ProcessGroup's allocateTensor).
//   Each rank combines its slice of the elements from all tensors, in place, and writes the result
//   into all of them. A second step tells that the tensors are done.
// - Through the staging memory otherwise, in chunks. A rank copies its part of a chunk into its
//   inbox; after a step each combines its slice of it and puts the result into its outbox; after
//   another each copies the others' results into its own tensor. Inbox and outbox are double, so
//   that the copy of the next chunk goes into the same step as the work on this one: one step a
//   chunk.
//
// An element is combined by one rank, or by all of them in the same way, in the order of the ranks:
// the result is the same on all ranks, and does not depend on timing.
//
// A step also says that this rank has read what it needed of the step before. So the halves of the
// double buffers, and the mailboxes, are written again only after all ranks have gone on.

namespace ddp::shm {
namespace {

/// Bytes of the message in one chunk: inbox and outbox then stay in the second-level cache.
constexpr std::size_t kChunkBytes = std::size_t{256} << 10;

std::size_t message_bytes(const Call& call, int size) {
  const auto bytes = call.count * size_of(call.type);
  return call.kind == Kind::kReduceScatter ? bytes * static_cast<std::size_t>(size) : bytes;
}

}  // namespace

Collectives::Collectives(Communicator& ranks) : ranks_(ranks), kernels_(kernels().front()) {
  sources_.resize(ranks.size());
  targets_.resize(ranks.size());
  staging_.resize(ranks.size());
}

Collectives::~Collectives() {
  // The arena may live on, for a tensor in it; and others may be at the last results.
  if (own_staging_ != nullptr) {
    ranks_.arena().leave_to_others(own_staging_);
  }
}

bool Collectives::run(const Call& call, Clock::time_point pause, Patience patience) {
  if (!under_way_) {
    begin(call);
  }
  do {
    if (!ranks_.wait_for_all(pause, deadline_, patience, call.timeout)) {
      return false;
    }
  } while (!advance(call));
  under_way_ = false;
  ++calls_;
  return true;
}

void Collectives::begin(const Call& call) {
  under_way_ = true;
  way_ = Way::kUnknown;
  stage_ = 0;
  deadline_ = Clock::now() + std::min<std::chrono::milliseconds>(call.timeout, kLongest);
  auto& own = ranks_.mailbox(ranks_.rank()).announcements[calls_ % 2];
  own = Announcement();
  own.kind = call.kind;
  own.type = call.type;
  own.op = call.op;
  own.root = call.root;
  own.count = call.count;
  if (call.kind != Kind::kBarrier) {
    const auto bytes = message_bytes(call, ranks_.size());
    if (bytes <= kInlineBytes) {
      write_message(call);
    } else if (call.kind != Kind::kBroadcast || call.root == ranks_.rank()) {
      if (call.data != nullptr) {
        own.data = ranks_.arena().find(call.data, bytes);
      }
      if (own.data.serial == 0) {
        // The way is clear already.
        stage(call, 0);
        own.is_staged = true;
        own.staging = own_staging_place_;
      }
    }
  }
  ranks_.step();
}

void Collectives::check_announcements() const {
  for (int rank = 1; rank < ranks_.size(); ++rank) {
    if (!fits(announcement(0), announcement(rank))) {
      throw ShmError(
          fmt::format("the ranks' calls do not fit together: rank 0 called {}, rank {} {}",
                      describe(announcement(0)), rank, describe(announcement(rank))));
    }
  }
}

bool Collectives::advance(const Call& call) {
  switch (way_) {
    case Way::kUnknown:
      return advance_announced(call);
    case Way::kDirect:
      return true;
    case Way::kStaged:
      return advance_staged(call);
    case Way::kMailbox:
      break;
  }
  return true;
}

bool Collectives::advance_announced(const Call& call) {
  check_announcements();
  if (call.kind == Kind::kBarrier) {
    return true;
  }
  if (message_bytes(call, ranks_.size()) <= kInlineBytes) {
    finish_from_mailboxes(call);
    return true;
  }
  bool all_direct = true;
  bool all_staged = true;
  for (int rank = 0; rank < ranks_.size(); ++rank) {
    if (call.kind != Kind::kBroadcast || rank == call.root) {
      all_direct = all_direct && announcement(rank).data.serial != 0;
      all_staged = all_staged && announcement(rank).is_staged;
    }
  }
  if (all_direct) {
    way_ = Way::kDirect;
    return advance_direct(call);
  }
  way_ = Way::kStaged;
  if (all_staged) {
    return advance_staged(call);
  }
  if (!announcement(ranks_.rank()).is_staged) {
    stage(call, 0);
    ranks_.mailbox(ranks_.rank()).announcements[calls_ % 2].staging = own_staging_place_;
  }
  ranks_.step();
  return false;
}

// ---- Through the mailboxes ----

void Collectives::write_message(const Call& call) {
  const auto bytes = call.count * size_of(call.type);
  if (bytes == 0) {
    return;
  }
  auto* const out = message(ranks_.rank());
  if (call.kind == Kind::kReduceScatter) {
    for (int rank = 0; rank < ranks_.size(); ++rank) {
      const auto offset = static_cast<std::size_t>(rank) * bytes;
      std::memcpy(out + offset, call.data != nullptr ? call.data + offset : call.pieces[rank],
                  bytes);
    }
  } else if (call.kind != Kind::kBroadcast || call.root == ranks_.rank()) {
    std::memcpy(out, call.data, bytes);
  }
}

void Collectives::finish_from_mailboxes(const Call& call) {
  const auto bytes = call.count * size_of(call.type);
  if (bytes == 0) {
    return;
  }
  const int own = ranks_.rank();
  switch (call.kind) {
    case Kind::kBroadcast:
      if (call.root != own) {
        std::memcpy(call.data, message(call.root), bytes);
      }
      return;
    case Kind::kAllGather:
      for (int rank = 0; rank < ranks_.size(); ++rank) {
        std::memcpy(call.pieces[rank], message(rank), bytes);
      }
      return;
    case Kind::kReduce:
      if (call.root != own) {
        return;
      }
      [[fallthrough]];
    case Kind::kAllReduce:
    case Kind::kReduceScatter: {
      const bool scatters = call.kind == Kind::kReduceScatter;
      const auto offset = scatters ? static_cast<std::size_t>(own) * bytes : 0;
      for (int rank = 0; rank < ranks_.size(); ++rank) {
        sources_[rank] = message(rank) + offset;
      }
      targets_[0] = scatters ? call.output : call.data;
      combine(call, call.count, 1);
      return;
    }
    case Kind::kBarrier:
      return;
  }
}

// ---- Directly ----

bool Collectives::advance_direct(const Call& call) {
  const int own = ranks_.rank();
  const auto element = size_of(call.type);
  const auto bytes = message_bytes(call, ranks_.size());
  const auto of = [&](int rank) {
    return rank == own ? call.data : ranks_.resolve(rank, announcement(rank).data, bytes);
  };
  switch (call.kind) {
    case Kind::kAllReduce:
    case Kind::kReduce: {
      const auto part = slice(call.count, own, element);
      int targets = 0;
      for (int rank = 0; rank < ranks_.size(); ++rank) {
        auto* const begin = of(rank) + part.begin * element;
        sources_[rank] = begin;
        if (call.kind == Kind::kAllReduce || rank == call.root) {
          targets_[targets++] = begin;
        }
      }
      combine(call, part.size(), targets);
      break;
    }
    case Kind::kBroadcast:
      if (call.root != own) {
        std::memcpy(call.data, of(call.root), bytes);
      }
      break;
    case Kind::kAllGather:
      // From the next rank on, so that not all read from one.
      for (int turn = 0; turn < ranks_.size(); ++turn) {
        const int rank = (own + turn) % ranks_.size();
        if (call.pieces[rank] != of(rank)) {
          std::memmove(call.pieces[rank], of(rank), bytes);
        }
      }
      break;
    case Kind::kReduceScatter:
      for (int rank = 0; rank < ranks_.size(); ++rank) {
        sources_[rank] = of(rank) + static_cast<std::size_t>(own) * call.count * element;
      }
      targets_[0] = call.output;
      combine(call, call.count, 1);
      break;
    case Kind::kBarrier:
      break;
  }
  // The others may still read this rank's tensor, or write into it.
  ranks_.step();
  return false;
}

// ---- Through the staging memory ----

void Collectives::make_staging() {
  if (own_staging_ == nullptr) {
    own_staging_ = ranks_.arena().allocate(4 * kChunkBytes);
    own_staging_place_ = ranks_.arena().find(own_staging_, 4 * kChunkBytes);
    staging_[ranks_.rank()] = own_staging_;
  }
}

void Collectives::resolve_staging(const Call& call) {
  for (int rank = 0; rank < ranks_.size(); ++rank) {
    if (staging_[rank] == nullptr && (call.kind != Kind::kBroadcast || rank == call.root)) {
      staging_[rank] = ranks_.resolve(rank, announcement(rank).staging, 4 * kChunkBytes);
    }
  }
}

std::byte* Collectives::inbox(int rank, std::size_t chunk) const {
  return staging_[rank] + chunk % 2 * kChunkBytes;
}

std::byte* Collectives::outbox(int rank, std::size_t chunk) const {
  return staging_[rank] + (2 + chunk % 2) * kChunkBytes;
}

std::size_t Collectives::chunk_elements(const Call& call) const {
  const auto pieces =
      call.kind == Kind::kReduceScatter ? static_cast<std::size_t>(ranks_.size()) : 1;
  return std::max<std::size_t>(1, kChunkBytes / size_of(call.type) / pieces);
}

Collectives::Range Collectives::chunk(const Call& call, std::size_t number) const {
  const auto elements = chunk_elements(call);
  return {std::min(call.count, number * elements), std::min(call.count, (number + 1) * elements)};
}

void Collectives::stage(const Call& call, std::size_t number) {
  const int own = ranks_.rank();
  if (call.kind == Kind::kBroadcast && call.root != own) {
    return;
  }
  make_staging();
  const auto element = size_of(call.type);
  const auto range = chunk(call, number);
  auto* const in = inbox(own, number);
  switch (call.kind) {
    case Kind::kAllReduce:
    case Kind::kReduce:
      // What this rank combines itself, it reads from the tensor.
      for (const auto part : {Range{0, slice(range.size(), own, element).begin},
                              Range{slice(range.size(), own, element).end, range.size()}}) {
        std::memcpy(in + part.begin * element, call.data + (range.begin + part.begin) * element,
                    part.size() * element);
      }
      break;
    case Kind::kBroadcast:
    case Kind::kAllGather:
      std::memcpy(in, call.data + range.begin * element, range.size() * element);
      break;
    case Kind::kReduceScatter: {
      const auto stride = chunk_elements(call) * element;
      for (int rank = 0; rank < ranks_.size(); ++rank) {
        if (rank != own) {
          const auto* const piece =
              call.data != nullptr
                  ? call.data + static_cast<std::size_t>(rank) * call.count * element
                  : call.pieces[rank];
          std::memcpy(in + static_cast<std::size_t>(rank) * stride, piece + range.begin * element,
                      range.size() * element);
        }
      }
      break;
    }
    case Kind::kBarrier:
      break;
  }
}

void Collectives::work_on(const Call& call, std::size_t number) {
  const int own = ranks_.rank();
  const auto element = size_of(call.type);
  const auto range = chunk(call, number);
  switch (call.kind) {
    case Kind::kAllReduce:
    case Kind::kReduce: {
      const auto part = slice(range.size(), own, element);
      auto* const in_tensor = call.data + (range.begin + part.begin) * element;
      for (int rank = 0; rank < ranks_.size(); ++rank) {
        sources_[rank] = rank == own ? in_tensor : inbox(rank, number) + part.begin * element;
      }
      int targets = 0;
      if (call.kind == Kind::kAllReduce || call.root == own) {
        targets_[targets++] = in_tensor;
      }
      if (ranks_.size() > 1 && (call.kind == Kind::kAllReduce || call.root != own)) {
        targets_[targets++] = outbox(own, number) + part.begin * element;
      }
      combine(call, part.size(), targets);
      break;
    }
    case Kind::kBroadcast:
      if (call.root != own) {
        std::memcpy(call.data + range.begin * element, inbox(call.root, number),
                    range.size() * element);
      }
      break;
    case Kind::kAllGather:
      for (int turn = 0; turn < ranks_.size(); ++turn) {
        const int rank = (own + turn) % ranks_.size();
        auto* const to = call.pieces[rank] + range.begin * element;
        if (rank != own) {
          std::memcpy(to, inbox(rank, number), range.size() * element);
        } else if (call.pieces[rank] != call.data) {
          std::memmove(to, call.data + range.begin * element, range.size() * element);
        }
      }
      break;
    case Kind::kReduceScatter: {
      const auto stride = chunk_elements(call) * element;
      for (int rank = 0; rank < ranks_.size(); ++rank) {
        const auto* const own_piece =
            call.data != nullptr ? call.data + static_cast<std::size_t>(own) * call.count * element
                                 : call.pieces[own];
        sources_[rank] = rank == own ? own_piece + range.begin * element
                                     : inbox(rank, number) + static_cast<std::size_t>(own) * stride;
      }
      targets_[0] = call.output + range.begin * element;
      combine(call, range.size(), 1);
      break;
    }
    case Kind::kBarrier:
      break;
  }
}

void Collectives::take_out(const Call& call, std::size_t number) {
  const int own = ranks_.rank();
  if (call.kind != Kind::kAllReduce && !(call.kind == Kind::kReduce && call.root == own)) {
    return;
  }
  const auto element = size_of(call.type);
  const auto range = chunk(call, number);
  for (int turn = 1; turn < ranks_.size(); ++turn) {
    const int rank = (own + turn) % ranks_.size();
    const auto part = slice(range.size(), rank, element);
    std::memcpy(call.data + (range.begin + part.begin) * element,
                outbox(rank, number) + part.begin * element, part.size() * element);
  }
}

bool Collectives::advance_staged(const Call& call) {
  const auto elements = chunk_elements(call);
  const auto chunks = (call.count + elements - 1) / elements;
  if (stage_ == 0) {
    resolve_staging(call);
  } else {
    take_out(call, stage_ - 1);
  }
  if (stage_ == chunks) {
    return true;
  }
  if (stage_ + 1 < chunks) {
    stage(call, stage_ + 1);
  }
  work_on(call, stage_);
  ++stage_;
  ranks_.step();
  return false;
}

// ---- Common to all ----

Collectives::Range Collectives::slice(std::size_t elements, int rank,
                                      std::size_t element_bytes) const {
  const auto line = kCacheLine / element_bytes;
  const auto lines = (elements + line - 1) / line;
  const auto size = static_cast<std::size_t>(ranks_.size());
  const auto at = [&](std::size_t number) {
    return std::min(elements, lines * number / size * line);
  };
  return {at(static_cast<std::size_t>(rank)), at(static_cast<std::size_t>(rank) + 1)};
}

void Collectives::combine(const Call& call, std::size_t elements, int target_count) {
  if (elements > 0 && target_count > 0) {
    kernels_.find(call.type, call.op)(sources_.data(), ranks_.size(), targets_.data(), target_count,
                                      elements, 1.0 / ranks_.size());
  }
}

}  // namespace ddp::shm
