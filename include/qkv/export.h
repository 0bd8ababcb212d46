#pragma once

// QKV_API marks what the shared library exports; everything else stays inside.

#define QKV_API __attribute__((visibility("default")))
