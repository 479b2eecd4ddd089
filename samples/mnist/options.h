#pragma once

#include <cstdint>
#include <optional>
#include <string>

/// What the command line asks for. The defaults are in options.cpp.
struct Options {
  int local_rank = -1;  // -1: a single process, without a process group
  std::string data;
  int epochs = 0;
  std::int64_t batch_size = 0;  // of each process
  double lr = 0;
  std::int64_t seed = 0;
  std::string backend;  // empty: the best one here
  std::string save;     // empty: do not save
  bool batch_norm = true;
  bool double_precision = false;
  bool check_every_step = false;
};

/// Reads the command line; nothing where it asked for help, which is printed then.
/// Throws std::runtime_error for a command line that makes no sense.
std::optional<Options> parse_options(int argc, char** argv);
