#include <cstring>
#include <fcntl.h>
#include <fstream>
#include <sstream>
#include <sys/resource.h>
#include <sys/wait.h>
#include <test/support/catch2.h>
#include <unistd.h>
#include <vector>

#include <ddp/process_group/shm/arena.h>
#include <ddp/process_group/shm/offer.h>
#include <ddp/process_group/shm/peer.h>
#include <ddp/process_group/shm/segment.h>
#include <ddp/process_group/shm/shm_error.h>

using ddp::shm::Arena;
using ddp::shm::Offer;
using ddp::shm::Peer;
using ddp::shm::Segment;
using ddp::shm::ShmError;

namespace {

/// How many pieces of this process's memory are ours.
int mappings() {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += line.find("/memfd:ddp") != std::string::npos ? 1 : 0;
  }
  return count;
}

std::unique_ptr<Peer> peer_of(const Arena& arena) {
  return std::make_unique<Peer>(getpid(), arena.mailbox_fd(), arena.cookie());
}

}  // namespace

TEST_CASE("a segment is shared with whoever attaches it, and gone with its last user") {
  const int before = mappings();
  {
    auto made = Segment::create(100000);
    CHECK(made.bytes() >= 100000);
    CHECK((fcntl(made.fd(), F_GETFD) & FD_CLOEXEC) != 0);
    auto seen = Segment::attach(getpid(), made.fd(), 100000);
    std::memset(made.data(), 42, 100000);
    CHECK(seen.data() != made.data());
    CHECK(seen.data()[99999] == static_cast<std::byte>(42));
    CHECK(mappings() == before + 2);
    CHECK(ftruncate(made.fd(), 0) != 0);  // nobody can take the pages away
    made.discard();
    CHECK(seen.data()[99999] == static_cast<std::byte>(0));
    CHECK_THROWS_WITH(Segment::attach(getpid(), made.fd(), 1 << 20),
                      contains("cannot be mapped (") && contains("another file"));
    CHECK_THROWS_WITH(Segment::attach(getpid(), 9999, 100), contains("cannot be opened"));
  }
  CHECK(mappings() == before);
}

TEST_CASE("memory that the machine does not have is an error when it is asked for") {
  // Not an amount that the system could begin to hand out.
  CHECK_THROWS_WITH(Segment::create(std::size_t{1} << 50),
                    contains("there is no room for 1125899906842624 bytes of shared memory (Cannot "
                             "allocate memory)"));
  rlimit none{0, 0};
  rlimit before{};
  getrlimit(RLIMIT_NOFILE, &before);
  none.rlim_max = before.rlim_max;
  setrlimit(RLIMIT_NOFILE, &none);
  std::string error;
  try {
    Segment::create(100);
  } catch (const ShmError& failed) {
    error = failed.what();
  }
  setrlimit(RLIMIT_NOFILE, &before);
  CHECK_THAT(error, contains("the system makes no shared memory (memfd_create: "));
}

TEST_CASE("an arena's memory is found by others, also after it was freed and used again") {
  const int before = mappings();
  auto arena = std::make_shared<Arena>();
  auto peer = peer_of(*arena);
  CHECK(arena->find(&arena, 8).serial == 0);
  for (int round = 0; round < 3; ++round) {
    std::vector<std::byte*> pieces;
    for (const std::size_t bytes : {1, 5000, 300000}) {
      pieces.push_back(arena->allocate(bytes));
      CHECK(reinterpret_cast<std::uintptr_t>(pieces.back()) % 64 == 0);
      pieces.back()[bytes - 1] = static_cast<std::byte>(round + 1);
      const auto place = arena->find(pieces.back(), bytes);
      CHECK(place.serial != 0);
      CHECK(peer->resolve(place, bytes)[bytes - 1] == static_cast<std::byte>(round + 1));
      // A part of it, too; nothing that goes beyond.
      CHECK(peer->resolve(arena->find(pieces.back() + bytes / 2, 1), 1) ==
            peer->resolve(place, bytes) + bytes / 2);
      CHECK(arena->find(pieces.back(), bytes + (1 << 20)).serial == 0);
      CHECK_THROWS_WITH(peer->resolve(place, bytes + (1 << 20)),
                        contains("is smaller than the rank announced"));
    }
    const auto place = arena->find(pieces[1], 5000);
    for (auto* piece : pieces) {
      arena->release(piece);
    }
    CHECK(arena->find(pieces[1], 5000).serial == 0);
    if (round == 2) {
      // Known to the peer already: its memory stays valid as long as it looks at it.
      CHECK(peer->resolve(place, 5000) != nullptr);
      peer = peer_of(*arena);
      CHECK_THROWS_AS(peer->resolve(place, 5000), ShmError);
      CHECK_THROWS_WITH(peer->resolve({place.serial, 0, ddp::shm::kSegments}, 8),
                        contains("not what the rank announced"));
    }
  }
  peer.reset();
  arena.reset();
  CHECK(mappings() == before);
}

TEST_CASE("an arena says when its table is full") {
  Arena arena;
  std::vector<std::byte*> pieces;
  std::string error;
  rlimit files{};
  getrlimit(RLIMIT_NOFILE, &files);
  const auto before = files;
  files.rlim_cur = std::min<rlim_t>(files.rlim_max, 2048);
  setrlimit(RLIMIT_NOFILE, &files);
  try {
    for (int number = 0; number <= ddp::shm::kSegments; ++number) {
      pieces.push_back(arena.allocate(10));
    }
  } catch (const ShmError& failed) {
    error = failed.what();
  }
  for (auto* piece : pieces) {
    arena.release(piece);
  }
  setrlimit(RLIMIT_NOFILE, &before);
  if (files.rlim_cur >= 1200) {
    CHECK(pieces.size() == ddp::shm::kSegments);
    CHECK_THAT(error, contains("pieces of shared memory, which is all that it can have"));
  }
}

TEST_CASE("only the process that made the offer is taken for the rank") {
  Arena arena;
  Arena other;
  CHECK_THROWS_WITH(Peer(getpid(), arena.mailbox_fd(), arena.cookie() + 1),
                    contains("is not that of the rank"));
  CHECK_THROWS_WITH(Peer(getpid(), other.mailbox_fd(), arena.cookie()),
                    contains("is not that of the rank"));
  const pid_t child = fork();
  if (child == 0) {
    _exit(0);
  }
  waitpid(child, nullptr, 0);
  CHECK_THROWS_WITH(Peer(child, arena.mailbox_fd(), arena.cookie()),
                    contains("cannot be watched (pidfd_open: "));
}

TEST_CASE("a peer that ends is seen, and so is what it wrote before") {
  int ends[2];
  int hold[2];
  REQUIRE(pipe(ends) == 0);
  REQUIRE(pipe(hold) == 0);
  const pid_t child = fork();
  if (child == 0) {
    close(hold[1]);
    const Arena arena;
    arena.mailbox().progress.store(17);
    const auto text = Offer::of_this_process(arena).text();
    (void)!write(ends[1], text.data(), text.size());
    close(ends[1]);
    char byte = 0;
    (void)!read(hold[0], &byte, 1);
    raise(SIGKILL);
  }
  close(ends[1]);
  close(hold[0]);
  std::string text;
  char chunk[4096];
  for (ssize_t count = 0; (count = read(ends[0], chunk, sizeof(chunk))) > 0;) {
    text.append(chunk, static_cast<std::size_t>(count));
  }
  const auto offer = Offer::parse(text);
  REQUIRE(offer);
  CHECK(offer->text() == text);
  CHECK(offer->pid == child);
  CHECK(!offer->processors.empty());
  const Peer peer(offer->pid, offer->mailbox_fd, offer->cookie);
  CHECK(!peer.has_ended());
  close(hold[1]);
  waitpid(child, nullptr, 0);
  CHECK(peer.has_ended());
  CHECK(peer.mailbox().progress.load() == 17);
  close(ends[0]);
}

TEST_CASE("what is no offer is none") {
  CHECK(!Offer::parse(""));
  CHECK(!Offer::parse("- there is no room"));
  CHECK(!Offer::parse("machine/1 0 abc"));
}
