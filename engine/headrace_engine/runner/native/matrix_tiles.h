/* Matrix tiles of Intel's AMX: registers of 16 rows of 64 bytes, and the product of two of them. Include after vectors.h.
 *
 *   sums[16][16] += x[16][16 pairs] . w[16 pairs][16]     pairs of bfloat16, sums in float32
 *
 * In memory, x is stored by rows and w by pairs of rows, the layout of PAIRS. */
#if HAS_PAIRS && defined(__AMX_BF16__) && defined(__linux__)
#define HAS_MATRIX_TILES 1
#include <sys/syscall.h>
#include <unistd.h>
#else
#define HAS_MATRIX_TILES 0
#endif

#define TILE_ROWS 16
#define TILE_BYTES 64  /* of one row */
#define TILE_INPUTS 32 /* bfloat16 values in a row */

#if HAS_MATRIX_TILES
#ifndef ARCH_REQ_XCOMP_PERM
#define ARCH_REQ_XCOMP_PERM 0x1023
#endif
#ifndef XFEATURE_XTILEDATA
#define XFEATURE_XTILEDATA 18
#endif

static int matrix_tiles_enabled;

/* Linux enables the registers for all threads of a process that requests them. */
__attribute__((constructor)) static void request_matrix_tiles(void) {
    matrix_tiles_enabled = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

#define WEIGHT_TILE 7 /* the register for w, which always has 16 rows */

/* Configures the tiles of the calling thread: x and sums get `rows` rows, at most 16. Clears the registers. Call it before the
 * first tile, and whenever the number of rows changes. */
static inline void begin_matrix_tiles(int rows) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } __attribute__((packed, aligned(64))) shapes = {.palette = 1};
    for (int i = 0; i <= WEIGHT_TILE; i++) shapes.row_bytes[i] = TILE_BYTES, shapes.rows[i] = rows;
    shapes.rows[WEIGHT_TILE] = TILE_ROWS;
    __asm__ volatile("" : : "r"(&shapes) : "memory"); /* GCC assumes that only the first bytes are read */
    _tile_loadconfig(&shapes);
}

/* Releases the tiles of the calling thread: a context switch would save their content. */
static inline void end_matrix_tiles(void) { _tile_release(); }

/* Keeps memory accesses on their side: the compiler does not know what tile instructions read and write. */
static inline void compiler_barrier(void) { __asm__ volatile("" ::: "memory"); }
#else
enum { matrix_tiles_enabled = 0 };
static inline void begin_matrix_tiles(int rows) { (void)rows; }
static inline void end_matrix_tiles(void) {}
#endif
