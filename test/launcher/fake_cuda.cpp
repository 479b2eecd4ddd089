// Stands for the NVIDIA driver's library, libcuda.so.1: FAKE_GPUS has the devices' PCI addresses,
// or an error number after a '!'.

#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

namespace {

std::string setting() {
  const char* text = std::getenv("FAKE_GPUS");
  return text != nullptr ? text : "";
}

std::vector<std::string> devices() {
  std::istringstream stream(setting());
  std::vector<std::string> all;
  for (std::string device; stream >> device;) all.push_back(device);
  return all;
}

}  // namespace

extern "C" {

int cuInit(unsigned) { return setting().substr(0, 1) == "!" ? std::atoi(&setting()[1]) : 0; }

int cuDeviceGetCount(int* count) {
  *count = static_cast<int>(devices().size());
  return 0;
}

int cuDeviceGetPCIBusId(char* text, int size, int device) {
  std::snprintf(text, static_cast<size_t>(size), "%s",
                devices().at(static_cast<size_t>(device)).c_str());
  return 0;
}
}
