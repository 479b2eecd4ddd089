// See README.md beside this folder's top: LibTorch's ProcessGroupGloo.hpp includes Gloo's headers,
// which LibTorch does not ship, and uses none of this one's contents.
#pragma once
