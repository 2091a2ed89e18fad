// Lowering kinds: how an operator is lowered, as far as the recorder needs it.
//
// One with a rule is recorded. Of the others Python is asked once whether PyTorch has a
// decomposition, or whether a program can call PyTorch's CPU kernel (host_call.h); if neither, the
// operator runs on the host (host.h). A decomposition is checked with each kind of call, since
// its parts may have no lowering: such a call is a host call or runs on the host, too.
#pragma once

#include <functional>
#include <string>

#include "dispatch/op_info.h"
#include "dispatch/scan.h"
#include "dispatch/shape_memo.h"
#include "record/capture.h"

namespace lazyxla::dispatch {

// Of an operator, for the capture's platform, or with null for the one that runs.
LoweringKind lowering_kind_of(const OpInfo& info, const record::Capture* capture);

// Where a call runs that is to be lowered through a decomposition.
using CheckLowering = std::function<Recipe::Runs(const ir::OpSpec&, const Scan&)>;
Recipe::Runs check_lowering(const ir::OpSpec& spec, const Scan& scan);

// Sets Python's functions: how an operator is lowered ("decomposition", "call", "host", or anything
// else for a rule), and the check of a call that is decomposed.
void set_lowering(std::function<std::string(const std::string&)> how, CheckLowering check_lowering);

}  // namespace lazyxla::dispatch
