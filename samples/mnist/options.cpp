#include "options.h"

#include <cstdio>
#include <cstdlib>
#include <stdexcept>

#include <cxxopts.hpp>

#include <ddp/process_group/process_group.h>

namespace {

/// A process that a launcher started has LOCAL_RANK in its environment.
int local_rank_of_environment() {
  const char* value = std::getenv("LOCAL_RANK");
  return value != nullptr && *value != '\0' ? ddp::local_rank() : -1;
}

cxxopts::Options make_parser() {
  cxxopts::Options parser("mnist", "Trains a small convolutional network on handwritten digits.\n");
  parser.custom_help("[options]");
  // clang-format off
  parser.add_options()
    ("local_rank,local-rank", "This process's number on its node; -1: train in this process alone "
     "(default: the variable LOCAL_RANK, else -1)", cxxopts::value<int>(), "N")
    ("data", "Folder with MNIST's four files", cxxopts::value<std::string>()->default_value("data/mnist"), "DIR")
    ("epochs", "How often to go through the training set",
     cxxopts::value<int>()->default_value("6"), "N")
    ("batch_size,batch-size", "Images a step and process",
     cxxopts::value<std::int64_t>()->default_value("64"), "N")
    ("lr", "Learning rate", cxxopts::value<double>()->default_value("0.05"), "X")
    ("seed", "Where the initial parameters and the order of the images come from",
     cxxopts::value<std::int64_t>()->default_value("0"), "N")
    ("backend", "What carries the communication: gloo, shm or nccl (default: the best one here)",
     cxxopts::value<std::string>(), "NAME")
    ("save", "Where to save the trained network", cxxopts::value<std::string>(), "PATH")
    ("no_batch_norm,no-batch-norm", "Leave the batch normalisation out")
    ("double", "Compute in double precision")
    ("check_every_step,check-every-step", "Compare the parameters of all ranks after each step, not each epoch")
    ("h,help", "Print this");
  // clang-format on
  return parser;
}

void require(bool holds, const std::string& otherwise) {
  if (!holds) {
    throw std::runtime_error(otherwise + "; see --help");
  }
}

}  // namespace

std::optional<Options> parse_options(int argc, char** argv) {
  auto parser = make_parser();
  cxxopts::ParseResult given;
  try {
    given = parser.parse(argc, argv);
  } catch (const cxxopts::exceptions::exception& error) {
    require(false, error.what());
  }
  if (given.count("help") > 0) {
    std::fputs(parser.help().c_str(), stdout);
    return std::nullopt;
  }
  require(given.unmatched().empty(),
          "unexpected argument " + (given.unmatched().empty() ? "" : given.unmatched()[0]));

  Options options;
  options.local_rank =
      given.count("local_rank") > 0 ? given["local_rank"].as<int>() : local_rank_of_environment();
  options.epochs = given["epochs"].as<int>();
  options.batch_size = given["batch_size"].as<std::int64_t>();
  options.lr = given["lr"].as<double>();
  options.seed = given["seed"].as<std::int64_t>();
  options.backend = given.count("backend") > 0 ? given["backend"].as<std::string>() : "";
  options.save = given.count("save") > 0 ? given["save"].as<std::string>() : "";
  options.data = given["data"].as<std::string>();
  options.batch_norm = given.count("no_batch_norm") == 0;
  options.double_precision = given.count("double") > 0;
  options.check_every_step = given.count("check_every_step") > 0;
  require(options.local_rank >= -1, "--local_rank must be -1 or more");
  require(options.epochs >= 0, "--epochs must not be negative");
  require(options.batch_size >= 1, "--batch_size must be positive");
  require(options.lr > 0, "--lr must be positive");
  return options;
}
