/* The levels of dynamic8, and a table of how many of them a magnitude has passed. */
#include "kernels.h"

#include <string.h>

enum { POSITIVE = 128 };

/* levels.DYNAMIC_LEVELS */
const float dynamic_levels[256] = {
    -0x1.fc6666p-1f, -0x1.f53334p-1f, -0x1.ee0000p-1f, -0x1.e6ccccp-1f,
    -0x1.df999ap-1f, -0x1.d86666p-1f, -0x1.d13334p-1f, -0x1.ca0000p-1f,
    -0x1.c2ccccp-1f, -0x1.bb999ap-1f, -0x1.b46666p-1f, -0x1.ad3334p-1f,
    -0x1.a60000p-1f, -0x1.9eccccp-1f, -0x1.97999ap-1f, -0x1.906666p-1f,
    -0x1.893334p-1f, -0x1.820000p-1f, -0x1.7accccp-1f, -0x1.73999ap-1f,
    -0x1.6c6666p-1f, -0x1.653334p-1f, -0x1.5e0000p-1f, -0x1.56ccccp-1f,
    -0x1.4f999ap-1f, -0x1.486666p-1f, -0x1.413334p-1f, -0x1.3a0000p-1f,
    -0x1.32ccccp-1f, -0x1.2b999ap-1f, -0x1.246666p-1f, -0x1.1d3334p-1f,
    -0x1.160000p-1f, -0x1.0eccccp-1f, -0x1.07999ap-1f, -0x1.006666p-1f,
    -0x1.f26666p-2f, -0x1.e40000p-2f, -0x1.d5999ap-2f, -0x1.c73334p-2f,
    -0x1.b8ccccp-2f, -0x1.aa6666p-2f, -0x1.9c0000p-2f, -0x1.8d999ap-2f,
    -0x1.7f3334p-2f, -0x1.70ccccp-2f, -0x1.626666p-2f, -0x1.540000p-2f,
    -0x1.45999ap-2f, -0x1.373334p-2f, -0x1.28ccccp-2f, -0x1.1a6666p-2f,
    -0x1.0c0000p-2f, -0x1.fb3334p-3f, -0x1.de6666p-3f, -0x1.c1999ap-3f,
    -0x1.a4ccccp-3f, -0x1.880000p-3f, -0x1.6b3334p-3f, -0x1.4e6666p-3f,
    -0x1.31999ap-3f, -0x1.14ccccp-3f, -0x1.f00000p-4f, -0x1.b66666p-4f,
    -0x1.93d70ap-4f, -0x1.8851ecp-4f, -0x1.7cccccp-4f, -0x1.7147aep-4f,
    -0x1.65c290p-4f, -0x1.5a3d70p-4f, -0x1.4eb852p-4f, -0x1.433334p-4f,
    -0x1.37ae14p-4f, -0x1.2c28f6p-4f, -0x1.20a3d8p-4f, -0x1.151eb8p-4f,
    -0x1.09999ap-4f, -0x1.fc28f6p-5f, -0x1.e51eb8p-5f, -0x1.ce147ap-5f,
    -0x1.b70a3ep-5f, -0x1.a00000p-5f, -0x1.88f5c2p-5f, -0x1.71eb86p-5f,
    -0x1.5ae148p-5f, -0x1.43d70ap-5f, -0x1.2cccccp-5f, -0x1.15c290p-5f,
    -0x1.fd70a4p-6f, -0x1.cf5c28p-6f, -0x1.a147aep-6f, -0x1.733334p-6f,
    -0x1.451eb8p-6f, -0x1.170a3ep-6f, -0x1.d1eb86p-7f, -0x1.75c290p-7f,
    -0x1.3e76c8p-7f, -0x1.2c0832p-7f, -0x1.19999ap-7f, -0x1.072b02p-7f,
    -0x1.e978d4p-8f, -0x1.c49ba6p-8f, -0x1.9fbe76p-8f, -0x1.7ae148p-8f,
    -0x1.560418p-8f, -0x1.3126eap-8f, -0x1.0c49bap-8f, -0x1.ced916p-9f,
    -0x1.851eb8p-9f, -0x1.3b645ap-9f, -0x1.e353f8p-10f, -0x1.4fdf3cp-10f,
    -0x1.eecbfcp-11f, -0x1.b3d07cp-11f, -0x1.78d4fep-11f, -0x1.3dd980p-11f,
    -0x1.02de00p-11f, -0x1.8fc504p-12f, -0x1.19ce08p-12f, -0x1.47ae14p-13f,
    -0x1.743e96p-14f, -0x1.15df66p-14f, -0x1.6f0068p-15f, -0x1.64840ep-16f,
    -0x1.040bfep-17f, -0x1.b43526p-19f, -0x1.27476cp-21f, 0x0.0p+0f,
    0x1.27476cp-21f, 0x1.b43526p-19f, 0x1.040bfep-17f, 0x1.64840ep-16f,
    0x1.6f0068p-15f, 0x1.15df66p-14f, 0x1.743e96p-14f, 0x1.47ae14p-13f,
    0x1.19ce08p-12f, 0x1.8fc504p-12f, 0x1.02de00p-11f, 0x1.3dd980p-11f,
    0x1.78d4fep-11f, 0x1.b3d07cp-11f, 0x1.eecbfcp-11f, 0x1.4fdf3cp-10f,
    0x1.e353f8p-10f, 0x1.3b645ap-9f, 0x1.851eb8p-9f, 0x1.ced916p-9f,
    0x1.0c49bap-8f, 0x1.3126eap-8f, 0x1.560418p-8f, 0x1.7ae148p-8f,
    0x1.9fbe76p-8f, 0x1.c49ba6p-8f, 0x1.e978d4p-8f, 0x1.072b02p-7f,
    0x1.19999ap-7f, 0x1.2c0832p-7f, 0x1.3e76c8p-7f, 0x1.75c290p-7f,
    0x1.d1eb86p-7f, 0x1.170a3ep-6f, 0x1.451eb8p-6f, 0x1.733334p-6f,
    0x1.a147aep-6f, 0x1.cf5c28p-6f, 0x1.fd70a4p-6f, 0x1.15c290p-5f,
    0x1.2cccccp-5f, 0x1.43d70ap-5f, 0x1.5ae148p-5f, 0x1.71eb86p-5f,
    0x1.88f5c2p-5f, 0x1.a00000p-5f, 0x1.b70a3ep-5f, 0x1.ce147ap-5f,
    0x1.e51eb8p-5f, 0x1.fc28f6p-5f, 0x1.09999ap-4f, 0x1.151eb8p-4f,
    0x1.20a3d8p-4f, 0x1.2c28f6p-4f, 0x1.37ae14p-4f, 0x1.433334p-4f,
    0x1.4eb852p-4f, 0x1.5a3d70p-4f, 0x1.65c290p-4f, 0x1.7147aep-4f,
    0x1.7cccccp-4f, 0x1.8851ecp-4f, 0x1.93d70ap-4f, 0x1.b66666p-4f,
    0x1.f00000p-4f, 0x1.14ccccp-3f, 0x1.31999ap-3f, 0x1.4e6666p-3f,
    0x1.6b3334p-3f, 0x1.880000p-3f, 0x1.a4ccccp-3f, 0x1.c1999ap-3f,
    0x1.de6666p-3f, 0x1.fb3334p-3f, 0x1.0c0000p-2f, 0x1.1a6666p-2f,
    0x1.28ccccp-2f, 0x1.373334p-2f, 0x1.45999ap-2f, 0x1.540000p-2f,
    0x1.626666p-2f, 0x1.70ccccp-2f, 0x1.7f3334p-2f, 0x1.8d999ap-2f,
    0x1.9c0000p-2f, 0x1.aa6666p-2f, 0x1.b8ccccp-2f, 0x1.c73334p-2f,
    0x1.d5999ap-2f, 0x1.e40000p-2f, 0x1.f26666p-2f, 0x1.006666p-1f,
    0x1.07999ap-1f, 0x1.0eccccp-1f, 0x1.160000p-1f, 0x1.1d3334p-1f,
    0x1.246666p-1f, 0x1.2b999ap-1f, 0x1.32ccccp-1f, 0x1.3a0000p-1f,
    0x1.413334p-1f, 0x1.486666p-1f, 0x1.4f999ap-1f, 0x1.56ccccp-1f,
    0x1.5e0000p-1f, 0x1.653334p-1f, 0x1.6c6666p-1f, 0x1.73999ap-1f,
    0x1.7accccp-1f, 0x1.820000p-1f, 0x1.893334p-1f, 0x1.906666p-1f,
    0x1.97999ap-1f, 0x1.9eccccp-1f, 0x1.a60000p-1f, 0x1.ad3334p-1f,
    0x1.b46666p-1f, 0x1.bb999ap-1f, 0x1.c2ccccp-1f, 0x1.ca0000p-1f,
    0x1.d13334p-1f, 0x1.d86666p-1f, 0x1.df999ap-1f, 0x1.e6ccccp-1f,
    0x1.ee0000p-1f, 0x1.f53334p-1f, 0x1.fc6666p-1f, 0x1.000000p+0f,
};

/* The positive ones of Levels.thresholds of them: what a value must exceed to be at the next level. The
 * negative ones are their mirror image, but for -1, which is no level. */
static const float THRESHOLDS[POSITIVE] = {
    0x1.27476ap-22f, 0x1.fe0700p-20f, 0x1.711946p-18f, 0x1.e68a0cp-17f,
    0x1.10a136p-15f, 0x1.cd5f9ap-15f, 0x1.450efcp-14f, 0x1.00e6aep-13f,
    0x1.bda510p-13f, 0x1.54c986p-12f, 0x1.cac080p-12f, 0x1.205bc0p-11f,
    0x1.5b573ep-11f, 0x1.9652bcp-11f, 0x1.d14e3ap-11f, 0x1.23a29cp-10f,
    0x1.999998p-10f, 0x1.16872ap-9f, 0x1.604188p-9f, 0x1.a9fbe6p-9f,
    0x1.f3b644p-9f, 0x1.1eb852p-8f, 0x1.439580p-8f, 0x1.6872b0p-8f,
    0x1.8d4fdep-8f, 0x1.b22d0ep-8f, 0x1.d70a3cp-8f, 0x1.fbe76cp-8f,
    0x1.10624cp-7f, 0x1.22d0e6p-7f, 0x1.353f7cp-7f, 0x1.5a1cacp-7f,
    0x1.a3d70ap-7f, 0x1.000000p-6f, 0x1.2e147ap-6f, 0x1.5c28f6p-6f,
    0x1.8a3d70p-6f, 0x1.b851eap-6f, 0x1.e66664p-6f, 0x1.0a3d70p-5f,
    0x1.2147acp-5f, 0x1.3851eap-5f, 0x1.4f5c28p-5f, 0x1.666666p-5f,
    0x1.7d70a2p-5f, 0x1.947ae0p-5f, 0x1.ab851ep-5f, 0x1.c28f5cp-5f,
    0x1.d99998p-5f, 0x1.f0a3d6p-5f, 0x1.03d70ap-4f, 0x1.0f5c28p-4f,
    0x1.1ae146p-4f, 0x1.266666p-4f, 0x1.31eb84p-4f, 0x1.3d70a4p-4f,
    0x1.48f5c2p-4f, 0x1.547ae0p-4f, 0x1.5ffffep-4f, 0x1.6b851ep-4f,
    0x1.770a3cp-4f, 0x1.828f5cp-4f, 0x1.8e147ap-4f, 0x1.a51eb8p-4f,
    0x1.d33332p-4f, 0x1.066666p-3f, 0x1.233332p-3f, 0x1.400000p-3f,
    0x1.5cccccp-3f, 0x1.79999ap-3f, 0x1.966664p-3f, 0x1.b33332p-3f,
    0x1.cffffep-3f, 0x1.ecccccp-3f, 0x1.04ccccp-2f, 0x1.133332p-2f,
    0x1.219998p-2f, 0x1.300000p-2f, 0x1.3e6666p-2f, 0x1.4cccccp-2f,
    0x1.5b3332p-2f, 0x1.699998p-2f, 0x1.77fffep-2f, 0x1.866666p-2f,
    0x1.94ccccp-2f, 0x1.a33332p-2f, 0x1.b19998p-2f, 0x1.c00000p-2f,
    0x1.ce6666p-2f, 0x1.dcccccp-2f, 0x1.eb3332p-2f, 0x1.f99998p-2f,
    0x1.03fffep-1f, 0x1.0b3332p-1f, 0x1.126664p-1f, 0x1.19999ap-1f,
    0x1.20ccccp-1f, 0x1.280000p-1f, 0x1.2f3332p-1f, 0x1.366666p-1f,
    0x1.3d9998p-1f, 0x1.44ccccp-1f, 0x1.4bfffep-1f, 0x1.533332p-1f,
    0x1.5a6664p-1f, 0x1.61999ap-1f, 0x1.68ccccp-1f, 0x1.700000p-1f,
    0x1.773332p-1f, 0x1.7e6666p-1f, 0x1.859998p-1f, 0x1.8cccccp-1f,
    0x1.93fffep-1f, 0x1.9b3332p-1f, 0x1.a26664p-1f, 0x1.a9999ap-1f,
    0x1.b0ccccp-1f, 0x1.b80000p-1f, 0x1.bf3332p-1f, 0x1.c66666p-1f,
    0x1.cd9998p-1f, 0x1.d4ccccp-1f, 0x1.dbfffep-1f, 0x1.e33332p-1f,
    0x1.ea6664p-1f, 0x1.f1999ap-1f, 0x1.f8ccccp-1f, 0x1.fe3332p-1f,
};

int32_t dynamic_entries[DYNAMIC_KEYS];

/* An interval of magnitudes with the same leading bits has one threshold at most: its other bits stand
 * above the number of those that come before. Where there is none, nothing exceeds what stands there. */
void dynamic_start(void)
{
    int32_t passed = 0;
    for (int32_t key = 0; key < DYNAMIC_KEYS; key++) {
        int32_t rest = DYNAMIC_REST, before = passed;
        if (passed < POSITIVE) {
            int32_t bits;
            memcpy(&bits, &THRESHOLDS[passed], sizeof bits);
            if (bits >> DYNAMIC_REST_BITS == DYNAMIC_FIRST_KEY + key) {
                rest = bits & DYNAMIC_REST;
                passed++;
            }
        }
        dynamic_entries[key] = rest << DYNAMIC_COUNT_BITS | before;
    }
}
