#include "cpu/features.h"

#include <string.h>

#include <utility>

namespace moe {
namespace {

constexpr const char* kWordNames[kWordCount] = {"CPUID leaf 1 ECX",           "CPUID leaf 7 EBX",          "CPUID leaf 7 EDX",
                                                "CPUID leaf 7 subleaf 1 EAX", "CPUID leaf 0x80000001 ECX", "XCR0"};

constexpr unsigned bit_of(int isa) { return 1u << isa; }
constexpr unsigned kNeedsTile = bit_of(kAmx);
constexpr unsigned kNeedsBf16 = kNeedsTile | bit_of(kAvx512Bf16);
constexpr unsigned kNeeds512 = kNeedsBf16 | bit_of(kAvx512);
constexpr unsigned kNeeds256 = kNeeds512 | bit_of(kAvx2) | bit_of(kAmxEmulated);
constexpr unsigned kShownOnly = 0;

struct Bit {
  Word word;
  int bit;
  const char* name;
  unsigned isas;  // those that need it
};

// Every bit of x86-64-v3, of x86-64-v4 and of the extensions that CMakeLists.txt compiles for, so that no compiled instruction can be an illegal one.
constexpr Bit kBits[] = {
    {kLeaf1Ecx, 0, "sse3", kNeeds256},
    {kLeaf1Ecx, 9, "ssse3", kNeeds256},
    {kLeaf1Ecx, 12, "fma", kNeeds256},
    {kLeaf1Ecx, 13, "cmpxchg16b", kNeeds256},
    {kLeaf1Ecx, 19, "sse4_1", kNeeds256},
    {kLeaf1Ecx, 20, "sse4_2", kNeeds256},
    {kLeaf1Ecx, 22, "movbe", kNeeds256},
    {kLeaf1Ecx, 23, "popcnt", kNeeds256},
    {kLeaf1Ecx, 27, "osxsave", kNeeds256},
    {kLeaf1Ecx, 28, "avx", kNeeds256},
    {kLeaf1Ecx, 29, "f16c", kNeeds256},
    {kExtended1Ecx, 0, "lahf", kNeeds256},
    {kExtended1Ecx, 5, "lzcnt", kNeeds256},
    {kLeaf7Ebx, 3, "bmi1", kNeeds256},
    {kLeaf7Ebx, 5, "avx2", kNeeds256},
    {kLeaf7Ebx, 8, "bmi2", kNeeds256},
    {kLeaf7Ebx, 16, "avx512f", kNeeds512},
    {kLeaf7Ebx, 17, "avx512dq", kNeeds512},
    {kLeaf7Ebx, 28, "avx512cd", kNeeds512},
    {kLeaf7Ebx, 30, "avx512bw", kNeeds512},
    {kLeaf7Ebx, 31, "avx512vl", kNeeds512},
    {kLeaf7Sub1Eax, 4, "avx_vnni", kShownOnly},
    {kLeaf7Sub1Eax, 5, "avx512_bf16", kNeedsBf16},
    {kLeaf7Sub1Eax, 21, "amx_fp16", kShownOnly},
    {kLeaf7Edx, 23, "avx512_fp16", kShownOnly},
    {kLeaf7Edx, 24, "amx_tile", kNeedsTile},
    {kLeaf7Edx, 22, "amx_bf16", kNeedsTile},
    {kLeaf7Edx, 25, "amx_int8", kShownOnly},
    {kXcr0, 1, "xcr0_sse", kNeeds256},
    {kXcr0, 2, "xcr0_avx", kNeeds256},
    {kXcr0, 5, "xcr0_opmask", kNeeds512},
    {kXcr0, 6, "xcr0_zmm_hi256", kNeeds512},
    {kXcr0, 7, "xcr0_hi16_zmm", kNeeds512},
    {kXcr0, 17, "xcr0_tile_config", kNeedsTile},
    {kXcr0, 18, "xcr0_tile_data", kNeedsTile},
};

constexpr const char* kIsaNames[kIsaCount] = {"amx", "avx512_bf16", "avx512", "avx2", "amx_emulated"};

bool is_set(const CpuBits& bits, const Bit& bit) { return (bits.words[bit.word] >> bit.bit & 1) != 0; }

std::string describe(const Bit& bit) {
  return std::string(kWordNames[bit.word]) + " bit " + std::to_string(bit.bit) + " (" + bit.name + ") is not set";
}

std::string missing(const CpuBits& bits, int isa) {
  std::string all;
  for (const Bit& bit : kBits) {
    if ((bit.isas & bit_of(isa)) == 0 || is_set(bits, bit)) continue;
    if (!all.empty()) all += "; ";
    all += describe(bit);
  }
  return all;
}

}  // namespace

const char* isa_name(int isa) { return isa >= 0 && isa < kIsaCount ? kIsaNames[isa] : nullptr; }

Decision decide(const CpuBits& bits) {
  Decision decision;
  for (int isa = 0; isa < kIsaCount; ++isa) {
    decision.order[isa] = isa;
    std::string& why_not = decision.why_not[isa];
    why_not = missing(bits, isa);
    if (why_not.empty() && isa == kAmx && bits.amx_errno != 0) {
      why_not =
          "the kernel refused AMX state (arch_prctl errno " + std::to_string(bits.amx_errno) + ", " + std::string(strerror(bits.amx_errno)) + ")";
    }
    if (!why_not.empty()) why_not = std::string(kIsaNames[isa]) + ": " + why_not;
  }
  // Intel's VDPBF16PS does half as many products a cycle as its two multiply-adds of float32 do (bench/results/xeon-2-threads.md); AMD's, twice as
  // many.
  if (bits.intel) std::swap(decision.order[kAvx512Bf16], decision.order[kAvx512]);
  return decision;
}

std::string feature_names(const CpuBits& bits) {
  std::string names;
  for (const Bit& bit : kBits) {
    if (!is_set(bits, bit)) continue;
    if (!names.empty()) names += ' ';
    names += bit.name;
  }
  return names;
}

}  // namespace moe
