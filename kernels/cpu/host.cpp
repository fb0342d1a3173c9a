// The half of features.h that reads this machine: CPUID, XGETBV and one request to the kernel.
#include "cpu/features.h"

#include <cpuid.h>
#include <errno.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace moe {
namespace {

struct Registers {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

// All zero past the last leaf that the CPU has.
Registers cpuid(uint32_t leaf, uint32_t subleaf) {
  Registers r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

uint32_t read_xcr0() {
  uint32_t low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

// Tile data is too large for every thread's context to carry it unasked, so a process asks once; its later threads and children inherit the answer.
int request_amx() {
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0 ? 0 : errno;
}

bool made_by_intel() {
  const Registers r = cpuid(0, 0);
  char maker[12];
  memcpy(maker, &r.ebx, 4);
  memcpy(maker + 4, &r.edx, 4);
  memcpy(maker + 8, &r.ecx, 4);
  return memcmp(maker, "GenuineIntel", sizeof maker) == 0;
}

CpuBits read_cpu() {
  CpuBits bits = {};
  bits.intel = made_by_intel();
  bits.words[kLeaf1Ecx] = cpuid(1, 0).ecx;
  const Registers leaf7 = cpuid(7, 0);
  bits.words[kLeaf7Ebx] = leaf7.ebx;
  bits.words[kLeaf7Edx] = leaf7.edx;
  if (leaf7.eax >= 1) bits.words[kLeaf7Sub1Eax] = cpuid(7, 1).eax;
  bits.words[kExtended1Ecx] = cpuid(0x80000001u, 0).ecx;
  constexpr uint32_t kOsXsave = 1u << 27;
  if (bits.words[kLeaf1Ecx] & kOsXsave) bits.words[kXcr0] = read_xcr0();
  // Asked only where everything else is there: elsewhere the answer decides nothing.
  if (decide(bits).why_not[kAmx].empty()) bits.amx_errno = request_amx();
  return bits;
}

struct Host {
  Decision decision;
  std::string features;
};

// Never destroyed: its strings are handed out, and threads may outlive the end of main.
const Host& host() {
  static const Host& only = *[] {
    const CpuBits bits = read_cpu();
    return new Host{decide(bits), feature_names(bits)};
  }();
  return only;
}

// One cache of "deterministic cache parameters", or 0 when the list ends or it is another one.
int64_t size_of_cache(const Registers& r) {
  const int64_t ways = (r.ebx >> 22) + 1, partitions = (r.ebx >> 12 & 0x3ff) + 1, line = (r.ebx & 0xfff) + 1, sets = static_cast<int64_t>(r.ecx) + 1;
  return ways * partitions * line * sets;
}

int64_t find_cache(uint32_t leaf, int level) {
  enum Type { kNone, kData, kInstruction, kUnified };
  constexpr uint32_t kMostCaches = 16;  // a hypervisor that never answers kNone must not hang us
  for (uint32_t index = 0; index < kMostCaches; ++index) {
    const Registers r = cpuid(leaf, index);
    const int type = static_cast<int>(r.eax & 0x1f);
    if (type == kNone) break;
    if (type != kInstruction && static_cast<int>(r.eax >> 5 & 7) == level) return size_of_cache(r);
  }
  return 0;
}

}  // namespace

const char* isa_why_not(int isa) {
  const std::string& why_not = host().decision.why_not[isa];
  return why_not.empty() ? nullptr : why_not.c_str();
}

int isa_in_order(int place) { return place >= 0 && place < kIsaCount ? host().decision.order[place] : -1; }

const char* cpu_features() { return host().features.c_str(); }

// Linux fills /sys/devices/system/cpu/*/cache from these same leaves, which containers often hide.
int64_t cache_bytes(int level) {
  // CPUID traps in a virtual machine and then takes tens of microseconds: every level is looked up once.
  constexpr uint32_t kIntelCaches = 4, kAmdCaches = 0x8000001du;
  constexpr int kLevels = 4;
  static const struct Caches {
    int64_t bytes[kLevels];
    Caches() {
      for (int i = 0; i < kLevels; ++i) {
        bytes[i] = find_cache(kIntelCaches, i);
        if (bytes[i] == 0) bytes[i] = find_cache(kAmdCaches, i);
      }
    }
  } caches;
  return level > 0 && level < kLevels ? caches.bytes[level] : 0;
}

}  // namespace moe
