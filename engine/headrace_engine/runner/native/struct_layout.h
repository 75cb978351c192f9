/* Exports the layout of a structure, so that native_library.py can compare it with the ctypes declaration.
 *
 *     EXPORT_LAYOUT(point, FIELD(point, x), FIELD(point, y));
 */
#include <stddef.h>
#include <stdint.h>

typedef struct {
    const char *name; /* NULL: the end of the table, whose `size` is the size of the structure */
    int64_t offset, size;
} field_layout;

#define FIELD(STRUCT, NAME) {#NAME, offsetof(STRUCT, NAME), sizeof(((STRUCT *)0)->NAME)}
#define EXPORT_LAYOUT(STRUCT, ...) const field_layout headrace_layout_##STRUCT[] = {__VA_ARGS__, {NULL, 0, sizeof(STRUCT)}}
