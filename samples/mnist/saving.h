#pragma once

#include <string>

#include "net.h"

/// Throws std::runtime_error where `save` could not write to `path`: better before training than
/// after.
void check_can_save(const std::string& path);

/// Writes `net`; whoever reads `path` meanwhile finds the old file or the new one, never half of
/// it.
void save(const Net& net, const std::string& path);
