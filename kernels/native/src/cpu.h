// Which instruction sets this machine and this process may use.
#pragma once

#include <string>

#include "table.h"

namespace octavo {

// The table named "portable", "avx2", "avx512" or "amx", or the best one for "". Throws std::invalid_argument when the
// name is unknown or the machine cannot run it.
const KernelTable& choose_table(const std::string& name);

// The names choose_table() accepts here, worst first.
std::string available_tables();

}  // namespace octavo
