#include <vector>

#include "check.h"
#include "moe/c_api.h"

TEST(probes_answer_with_a_rate) {
  std::vector<char> from(1 << 16, 'a'), to(1 << 16, 'b');
  const auto bytes = static_cast<int64_t>(from.size());
  for (int threads : {1, 2}) {
    CHECK(moe_probe_read_bandwidth(from.data(), bytes, threads, 0.01) > 0);
    CHECK(moe_probe_copy_bandwidth(from.data(), to.data(), bytes, threads, 0.01) > 0);
    for (int32_t isa = 0; isa < moe_isa_count(); ++isa) CHECK((moe_probe_matrix_peak(isa, threads, 0.01) > 0) == !moe_isa_why_not(isa));
  }
  CHECK(to == from);
  CHECK(moe_probe_read_bandwidth(from.data(), 63, 1, 0.01) == 0);
  CHECK(moe_probe_matrix_peak(-1, 1, 0.01) == 0 && moe_probe_matrix_peak(moe_isa_count(), 1, 0.01) == 0);
}
