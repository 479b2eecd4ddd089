#include "saving.h"

#include <filesystem>
#include <stdexcept>
#include <unistd.h>

#include <torch/serialize.h>

void check_can_save(const std::string& path) {
  const auto folder = std::filesystem::absolute(path).parent_path();
  if (!std::filesystem::is_directory(folder) || ::access(folder.c_str(), W_OK) != 0) {
    throw std::runtime_error("--save " + path + ": cannot write to the folder " + folder.string());
  }
  if (std::filesystem::is_directory(path)) {
    throw std::runtime_error("--save " + path + ": is a folder; give the name of a file");
  }
}

void save(const Net& net, const std::string& path) {
  const auto temporary = path + ".tmp";
  torch::save(net, temporary);
  std::filesystem::rename(temporary, path);
}
