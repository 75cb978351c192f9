/* Matrix tiles of Intel's AMX: registers of 16 rows of 64 bytes, and a multiplication of two of them. After vectors.h.
 *
 *   sums[16][16] += x[16][16 pairs] . w[16 pairs][16]     pairs of bfloat16, sums in float32
 *
 * What is given, in memory: x by rows, w by pairs of its rows, as PAIRS lie everywhere here. */
#if HAS_PAIRS && defined(__AMX_BF16__) && defined(__linux__)
#define HAS_MATRIX_TILES 1
#include <sys/syscall.h>
#include <unistd.h>
#else
#define HAS_MATRIX_TILES 0
#endif

#define TILE_ROWS 16
#define TILE_BYTES 64  /* of a row */
#define TILE_INPUTS 32 /* of a product: as many as a row holds in bfloat16 */

#if HAS_MATRIX_TILES
#ifndef ARCH_REQ_XCOMP_PERM
#define ARCH_REQ_XCOMP_PERM 0x1023
#endif
#ifndef XFEATURE_XTILEDATA
#define XFEATURE_XTILEDATA 18
#endif

static int matrix_tiles_lent;

/* Linux lends the registers to a process that asks for them; all its threads have them then. */
__attribute__((constructor)) static void ask_for_matrix_tiles(void) {
    matrix_tiles_lent = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

#define WEIGHT_TILE 7 /* the register for w, which is always whole */

/* Of each thread, before its first tile and whenever that changes: x and sums get so many rows, 16 at most. What the registers
 * hold is lost. */
static inline void begin_matrix_tiles(int rows) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } __attribute__((packed, aligned(64))) shapes = {.palette = 1};
    for (int i = 0; i <= WEIGHT_TILE; i++) shapes.row_bytes[i] = TILE_BYTES, shapes.rows[i] = rows;
    shapes.rows[WEIGHT_TILE] = TILE_ROWS;
    __asm__ volatile("" : : "r"(&shapes) : "memory"); /* the compiler believes that only its first bytes are read */
    _tile_loadconfig(&shapes);
}

/* Of each thread, behind its last: what the registers hold would be saved at every change of threads. */
static inline void end_matrix_tiles(void) { _tile_release(); }

/* The compiler does not know what tiles read and write: nothing moves past this. */
static inline void settle_memory(void) { __asm__ volatile("" ::: "memory"); }
#else
enum { matrix_tiles_lent = 0 };
static inline void begin_matrix_tiles(int rows) { (void)rows; }
static inline void end_matrix_tiles(void) {}
#endif
