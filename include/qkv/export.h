#pragma once

// QKV_API marks what the shared library exports; everything else stays inside.

#if defined(_WIN32)
#if defined(QKV_BUILDING_LIBRARY)
#define QKV_API __declspec(dllexport)
#else
#define QKV_API __declspec(dllimport)
#endif
#else
#define QKV_API __attribute__((visibility("default")))
#endif
