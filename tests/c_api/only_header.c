#include <gyre/gyre_c.h>
