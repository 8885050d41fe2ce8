#pragma once

#include "kernels.h"

namespace pagefleet {

const Kernels& choose_kernels();            // the best unit of this processor, or the one that was forced
const char* force_kernels(const char* isa);  // "": back to the best; returns null, or why not

}  // namespace pagefleet
