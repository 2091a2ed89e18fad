// See locks.h.
#pragma once

#include "common/locks.h"
