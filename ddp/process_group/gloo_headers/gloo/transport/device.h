// Declares Gloo's device, which this project only holds by shared pointer.
#pragma once

namespace gloo::transport {
class Device;
}  // namespace gloo::transport
