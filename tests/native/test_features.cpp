#include <errno.h>

#include <initializer_list>
#include <string>

#include "check.h"
#include "cpu/features.h"
#include "moe/c_api.h"
#include "moe/kernel_table.h"

namespace {

using namespace moe;

constexpr uint32_t bits(std::initializer_list<int> numbers) {
  uint32_t word = 0;
  for (int number : numbers) word |= 1u << number;
  return word;
}

// Machines by what their manuals say; xcr0 is what an operating system of their time enables.
CpuBits haswell() {
  CpuBits cpu = {};
  cpu.words[kLeaf1Ecx] = bits({0, 9, 12, 13, 19, 20, 22, 23, 27, 28, 29});
  cpu.words[kExtended1Ecx] = bits({0, 5});
  cpu.words[kLeaf7Ebx] = bits({3, 5, 8});
  cpu.words[kXcr0] = bits({0, 1, 2});
  return cpu;
}

CpuBits skylake_server() {
  CpuBits cpu = haswell();
  cpu.words[kLeaf7Ebx] |= bits({16, 17, 28, 30, 31});
  cpu.words[kXcr0] |= bits({5, 6, 7});
  return cpu;
}

CpuBits zen4() {
  CpuBits cpu = skylake_server();
  cpu.words[kLeaf7Sub1Eax] = bits({5});
  return cpu;
}

CpuBits sapphire_rapids() {
  CpuBits cpu = zen4();
  cpu.words[kLeaf7Edx] = bits({22, 23, 24, 25});
  cpu.words[kXcr0] |= bits({17, 18});
  return cpu;
}

// A set of ISAs that can run, as a string of '1' and '0' by their numbers.
std::string able(const CpuBits& cpu) {
  std::string text;
  for (const std::string& why_not : decide(cpu).why_not) text += why_not.empty() ? '1' : '0';
  return text;
}

CpuBits without(CpuBits cpu, Word word, std::initializer_list<int> numbers) {
  cpu.words[word] &= ~bits(numbers);
  return cpu;
}

}  // namespace

TEST(decide_on_known_machines) {
  CHECK(able(CpuBits{}) == "00000");
  CHECK(able(haswell()) == "00011");
  CHECK(able(skylake_server()) == "00111");
  CHECK(able(zen4()) == "01111");
  CHECK(able(sapphire_rapids()) == "11111");
}

TEST(decide_when_the_system_saves_less_than_the_cpu_has) {
  CHECK(able(without(sapphire_rapids(), kXcr0, {18})) == "01111");
  CHECK(able(without(sapphire_rapids(), kXcr0, {17})) == "01111");
  CHECK(able(without(sapphire_rapids(), kXcr0, {5})) == "00011");
  CHECK(able(without(sapphire_rapids(), kXcr0, {6})) == "00011");
  CHECK(able(without(sapphire_rapids(), kXcr0, {7})) == "00011");
  CHECK(able(without(sapphire_rapids(), kXcr0, {2})) == "00000");
  CHECK(able(without(sapphire_rapids(), kLeaf1Ecx, {27})) == "00000");
}

TEST(decide_when_one_bit_is_hidden) {
  for (int bit : {16, 17, 28, 30, 31}) CHECK(able(without(sapphire_rapids(), kLeaf7Ebx, {bit})) == "00011");
  for (int bit : {3, 5, 8}) CHECK(able(without(sapphire_rapids(), kLeaf7Ebx, {bit})) == "00000");
  for (int bit : {12, 28, 29}) CHECK(able(without(sapphire_rapids(), kLeaf1Ecx, {bit})) == "00000");
  CHECK(able(without(sapphire_rapids(), kLeaf7Sub1Eax, {5})) == "00111");
  CHECK(able(without(sapphire_rapids(), kLeaf7Edx, {22})) == "01111");
  CHECK(able(without(sapphire_rapids(), kLeaf7Edx, {24})) == "01111");
  CHECK(able(without(sapphire_rapids(), kLeaf7Edx, {23, 25})) == "11111");
}

TEST(decide_prefers_what_is_fastest) {
  CpuBits cpu = zen4();
  CHECK(decide(cpu).order[0] == kAmx && decide(cpu).order[1] == kAvx512Bf16 && decide(cpu).order[2] == kAvx512);
  cpu.intel = true;
  CHECK(decide(cpu).order[0] == kAmx && decide(cpu).order[1] == kAvx512 && decide(cpu).order[2] == kAvx512Bf16);
  CHECK(decide(cpu).order[3] == kAvx2 && decide(cpu).order[4] == kAmxEmulated);
}

TEST(decide_names_every_missing_bit) {
  CHECK(decide(without(sapphire_rapids(), kLeaf7Edx, {24})).why_not[kAmx] == "amx: CPUID leaf 7 EDX bit 24 (amx_tile) is not set");
  CHECK(decide(without(sapphire_rapids(), kXcr0, {17, 18})).why_not[kAmx] ==
        "amx: XCR0 bit 17 (xcr0_tile_config) is not set; XCR0 bit 18 (xcr0_tile_data) is not set");
  CHECK(decide(skylake_server()).why_not[kAvx512Bf16] == "avx512_bf16: CPUID leaf 7 subleaf 1 EAX bit 5 (avx512_bf16) is not set");
}

TEST(decide_reports_a_refusing_kernel) {
  CpuBits cpu = sapphire_rapids();
  cpu.amx_errno = EOPNOTSUPP;
  CHECK(able(cpu) == "01111");
  CHECK(decide(cpu).why_not[kAmx] == "amx: the kernel refused AMX state (arch_prctl errno 95, Operation not supported)");
}

TEST(feature_names_list_what_is_set) {
  CHECK(feature_names(CpuBits{}).empty());
  CpuBits cpu = {};
  cpu.words[kLeaf1Ecx] = bits({12});
  cpu.words[kLeaf7Edx] = bits({24});
  CHECK(feature_names(cpu) == "fma amx_tile");
}

TEST(host_answers_agree) {
  CHECK(moe_abi_version() == MOE_ABI_VERSION);
  CHECK(moe_isa_count() == kIsaCount);
  CHECK(moe_isa_name(-1) == nullptr && moe_isa_name(kIsaCount) == nullptr);
  CHECK(moe_isa_why_not(-1) != nullptr && moe_isa_why_not(kIsaCount) != nullptr);
  CHECK(kernel_table(-1) == nullptr && kernel_table(kIsaCount) == nullptr);
  for (int isa = 0; isa < kIsaCount; ++isa) {
    const KernelTable* table = kernel_table(isa);
    CHECK((table == nullptr) == (moe_isa_why_not(isa) != nullptr));
    CHECK(!table || std::string(table->name) == moe_isa_name(isa));
  }
  unsigned seen = 0;
  for (int place = 0; place < kIsaCount; ++place) seen |= 1u << moe_isa_in_order(place);
  CHECK(seen == (1u << kIsaCount) - 1 && moe_isa_in_order(-1) == -1 && moe_isa_in_order(kIsaCount) == -1);
  CHECK(moe_cache_bytes(0) == 0 && moe_cache_bytes(9) == 0 && moe_cache_bytes(-1) == 0);
  CHECK(moe_cache_bytes(1) <= moe_cache_bytes(2));
}
