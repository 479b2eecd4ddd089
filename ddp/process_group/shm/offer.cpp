#include <algorithm>
#include <fstream>
#include <sched.h>
#include <set>
#include <sstream>
#include <sys/stat.h>
#include <unistd.h>

#include <ddp/process_group/shm/offer.h>
#include <ddp/process_group/shm/shm_error.h>

namespace ddp::shm {

Offer Offer::of_this_process(const Arena& arena) {
  Offer own;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> own.machine;
  struct stat space {};
  if (own.machine.empty() || stat("/proc/self/ns/pid", &space) != 0) {
    throw ShmError("/proc does not tell this process's machine: it is not mounted");
  }
  own.machine += "/" + std::to_string(space.st_ino);
  own.user = geteuid();
  own.pid = getpid();
  own.mailbox_fd = arena.mailbox_fd();
  own.cookie = arena.cookie();
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    for (int processor = 0; processor < CPU_SETSIZE; ++processor) {
      if (CPU_ISSET(processor, &set)) {
        own.processors.push_back(processor);
      }
    }
  }
  return own;
}

std::string Offer::text() const {
  std::ostringstream out;
  out << machine << ' ' << user << ' ' << pid << ' ' << mailbox_fd << ' ' << cookie;
  for (const int processor : processors) {
    out << ' ' << processor;
  }
  return out.str();
}

std::optional<Offer> Offer::parse(const std::string& text) {
  std::istringstream in(text);
  Offer offer;
  if (!(in >> offer.machine >> offer.user >> offer.pid >> offer.mailbox_fd >> offer.cookie)) {
    return std::nullopt;
  }
  for (int processor = 0; in >> processor;) {
    offer.processors.push_back(processor);
  }
  return offer;
}

int count_processors(const std::vector<Offer>& offers) {
  std::set<int> all;
  for (const auto& offer : offers) {
    all.insert(offer.processors.begin(), offer.processors.end());
  }
  return static_cast<int>(all.size());
}

}  // namespace ddp::shm
