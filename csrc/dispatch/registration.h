// Registration: which operators the recorder handles.
//
// Those with a lowering are registered one by one, by the names that Python's registry gives (their
// in-place and out= forms included). Every other operator that has no kernel of its own reaches the
// recorder through the backend's fallback.
#pragma once

#include <string>
#include <vector>

namespace lazyxla::dispatch {

// Registers the recorder for these operators ("aten::addmm", ...) and for all that have one of them
// as functional counterpart. Operators that PyTorch decomposes (CompositeImplicitAutograd) are left
// alone. Returns the names registered.
std::vector<std::string> register_operators(const std::vector<std::string>& names);

// The operator that a call of operator `name` is recorded as; empty if it cannot be.
std::string functional_name(const std::string& name);

// Where the kernel of operator `name` for that key ("CPU") was registered, as PyTorch notes it:
// "registered at FILE:LINE". Empty if there is none, or only one for several keys.
std::string kernel_origin(const std::string& name, const std::string& key);

// The operator `name` has got another rule, a user's or ours again. It is recorded from now on,
// even if it has a kernel for all devices (as torch.library.custom_op makes them), and cached
// knowledge of it is dropped.
void rule_changed(const std::string& name, bool is_users);

}  // namespace lazyxla::dispatch
