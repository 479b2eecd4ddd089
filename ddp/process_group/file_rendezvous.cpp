#include <filesystem>
#include <fstream>
#include <sstream>
#include <unistd.h>

#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include <ddp/error.h>
#include <ddp/error_text.h>
#include <ddp/process_group/file_rendezvous.h>

namespace ddp::detail {
namespace {

namespace fs = std::filesystem;

std::string first_line(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

/// When process `pid` started, in the kernel's ticks; "" where there is no such process.
std::string start_of(const std::string& pid) {
  const auto line = first_line("/proc/" + pid + "/stat");
  // After the program's name, which may hold blanks and brackets: fields 3 to 22.
  const auto name_end = line.rfind(')');
  if (name_end == std::string::npos) {
    return {};
  }
  std::istringstream fields(line.substr(name_end + 1));
  std::string field;
  for (int number = 3; number <= 22; ++number) {
    fields >> field;
    if (number == 3 && (field == "Z" || field == "X")) {
      return {};
    }
  }
  return field;
}

/// The machine since its last start, and the process namespace on it: where `pid` means a process.
std::string place_of_processes() {
  std::error_code none;
  return first_line("/proc/sys/kernel/random/boot_id") + "," +
         fs::read_symlink("/proc/self/ns/pid", none).string();
}

std::string own_identity() {
  const auto pid = std::to_string(getpid());
  return place_of_processes() + " " + pid + " " + start_of(pid);
}

/// Whether the process of that identity is known to have ended; of another machine's nothing is
/// known.
bool is_gone(const std::string& identity) {
  std::istringstream fields(identity);
  std::string place;
  std::string pid;
  std::string start;
  fields >> place >> pid >> start;
  return place == place_of_processes() && start_of(pid) != start;
}

[[noreturn]] void refuse_stale(const MeetingPlace& place, int rank) {
  throw UsageError(
      fmt::format("rank {}: the file {} is left from an earlier run that did not end cleanly (rank "
                  "{} of it is gone): delete it, "
                  "or give every run a path of its own",
                  place.rank, place.path, rank));
}

void check_folder(const MeetingPlace& place) {
  const auto folder = fs::path(place.path).parent_path();
  std::error_code error;
  if (!fs::is_directory(folder, error)) {
    throw UsageError(
        fmt::format("rank {}: the file {} cannot be used as a store: there is no folder {}",
                    place.rank, place.path, folder.string()));
  }
  if (fs::exists(place.path, error)
          ? fs::is_directory(place.path, error) || access(place.path.c_str(), R_OK | W_OK) != 0
          : access(folder.c_str(), W_OK) != 0) {
    throw UsageError(
        fmt::format("rank {}: the file {} cannot be used as a store: it is not a file that can be "
                    "read and written",
                    place.rank, place.path));
  }
}

}  // namespace

c10::intrusive_ptr<c10d::Store> meet_at_file(const MeetingPlace& at, std::uint64_t generation) {
  auto place = at;
  if (generation > 0) {
    // The last rank to leave the group before deletes its file, which may be after a quick rank has
    // come to this one.
    place.path += fmt::format(".{}", generation);
  }
  check_folder(place);
  try {
    auto store = c10::make_intrusive<c10d::FileStore>(place.path, place.world_size);
    const auto key = [&](int rank) { return fmt::format("ddp/process/{}/{}", generation, rank); };
    const auto own = own_identity();
    const auto found = store->compareSet(key(place.rank), {}, {own.begin(), own.end()});
    if (const std::string other(found.begin(), found.end()); other != own) {
      if (is_gone(other)) {
        refuse_stale(place, place.rank);
      }
      throw UsageError(
          fmt::format("rank {0}: another process uses the file {1} as rank {0}: every process "
                      "needs a rank of its own, and every "
                      "job a file of its own",
                      place.rank, place.path));
    }
    for (int rank = 0; rank < place.world_size; ++rank) {
      if (rank != place.rank && store->check({key(rank)})) {
        const auto value = store->get(key(rank));
        if (is_gone({value.begin(), value.end()})) {
          refuse_stale(place, rank);
        }
      }
    }
    return store;
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw UsageError(fmt::format("rank {}: the file {} cannot be used as a store ({})", place.rank,
                                 place.path, concise(error)));
  }
}

}  // namespace ddp::detail
