// The kernel: one per PagedAttention node of a session.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "octavo/paged_attention.h"
#include "ort/api.h"
#include "ort/attributes.h"
#include "ort/config.h"
#include "ort/device.h"

namespace octavo::ort {

class Kernel {
 public:
  // `api` and `config` outlive the kernel. Errors: what read_attributes() and read_outputs() refuse, and the device's.
  static Status create(const OrtApi& api, const Config& config, MakeDevice make_device, const OrtKernelInfo* info,
                       std::unique_ptr<Kernel>& kernel);
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;

  // One call. Concurrent calls of one kernel are safe as long as they write different caches.
  Status compute(OrtKernelContext* context);

  const OrtApi& api() const noexcept { return api_; }

 private:
  // Where the caches lie that the node was given; Arguments has where they are updated.
  struct CacheInputs {
    const void* key;
    const void* value;
  };

  Kernel(const OrtApi& api, const Config& config) noexcept : api_(api), config_(config) {}

  Status read_inputs(const OrtKernelContext* context, Arguments& arguments) const;
  void shape_outputs(Arguments& arguments) const;
  PlanOptions plan_options() const noexcept;
  Status plan_for(const Problem& problem, const OrtKernelContext* context, std::shared_ptr<const Plan>& plan);
  void explain_choice(const Plan& plan, const OrtKernelContext* context) const;
  Status bind_outputs(OrtKernelContext* context, Arguments& arguments) const;
  Status find_copies(const Plan& plan, const Arguments& arguments, const CacheInputs& inputs,
                     std::vector<CacheCopy>& copies) const;

  const OrtApi& api_;
  const Config& config_;
  Attributes attributes_;
  OutputSet outputs_;
  std::string node_name_;
  std::unique_ptr<Device> device_;
  // The plan of the latest Problem. A session repeats the same few; whoever finds another one here plans anew.
  std::atomic<std::shared_ptr<const Plan>> latest_plan_;
};

}  // namespace octavo::ort
