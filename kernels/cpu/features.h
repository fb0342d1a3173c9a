// What this CPU and this kernel allow: each instruction set with a sentence for everything it lacks here.
#pragma once

#include <cstdint>
#include <string>

namespace moe {

// From the newest to the oldest, then the emulation; the numbers are the `isa` of c_api.h.
enum Isa { kAmx, kAvx512Bf16, kAvx512, kAvx2, kAmxEmulated, kIsaCount };
const char* isa_name(int isa);  // null past the end

// Words of CPUID and XCR0 that a decision reads, named leaf, then register.
enum Word { kLeaf1Ecx, kLeaf7Ebx, kLeaf7Edx, kLeaf7Sub1Eax, kExtended1Ecx, kXcr0, kWordCount };

struct CpuBits {
  uint32_t words[kWordCount];
  bool intel;     // the maker, from CPUID leaf 0
  int amx_errno;  // what arch_prctl(ARCH_REQ_XCOMP_PERM) answered, 0 = granted; read only where every AMX bit is there
};

struct Decision {
  std::string why_not[kIsaCount];  // empty: it can run
  int order[kIsaCount];            // the first of these that can run is the fastest
};

// Pure functions of the bits, so that tests cover machines that nobody here has.
Decision decide(const CpuBits& bits);
std::string feature_names(const CpuBits& bits);

// This machine, read once; the first call asks the kernel for AMX state.
const char* isa_why_not(int isa);  // null when it can run
int isa_in_order(int place);       // place 0 is tried first; -1 past the end
const char* cpu_features();
int64_t cache_bytes(int level);  // data or unified cache, 0 when unknown

}  // namespace moe
