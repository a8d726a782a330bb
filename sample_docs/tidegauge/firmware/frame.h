/* The frame that the gauge sends; frames.py decodes the same layout. */
#ifndef TIDEGAUGE_FRAME_H
#define TIDEGAUGE_FRAME_H

#include <stdint.h>

#define FRAME_SYNC          0xA7
#define FRAME_LENGTH        12
#define FRAME_INTERVAL_S    6
#define GAUGE_BAUD_RATE     19200
#define FLOAT_PULSES_PER_M  2048   /* pulses of the shaft encoder for one metre */
#define LOW_BATTERY_MV      10800  /* below it the gauge sets FLAG_BATTERY */

enum frame_flags {
    FLAG_BATTERY  = 0x01,  /* the battery is low */
    FLAG_ENCODER  = 0x02,  /* the encoder has missed pulses */
    FLAG_FROZEN   = 0x04,  /* the float has not moved for an hour */
    FLAG_RESTART  = 0x80,  /* first frame after the power came back */
};

/* All numbers are big-endian. */
struct __attribute__((packed)) frame {
    uint8_t  sync;       /* FRAME_SYNC */
    uint8_t  ident;      /* number of the station */
    uint8_t  sequence;   /* counts up by one and wraps at 255 */
    uint8_t  flags;      /* enum frame_flags */
    uint32_t time;       /* seconds since 1 January 2000, UTC */
    int16_t  level_mm;   /* level above the zero of the gauge */
    uint8_t  reserved;   /* always 0 */
    uint8_t  check;      /* CRC-8 of the eleven bytes before */
};

#endif
