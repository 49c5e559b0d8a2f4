// Package leaseclock is the clock that leases are counted on: it never goes back, and goes on while the machine sleeps.
package leaseclock

import (
	"time"

	"golang.org/x/sys/unix"
)

// Now is the time since some fixed instant, the same for all processes of this machine.
func Now() time.Duration {
	var now unix.Timespec
	if unix.ClockGettime(unix.CLOCK_BOOTTIME, &now) != nil {
		return time.Duration(time.Now().UnixNano()) // no kernel of this century gets here
	}
	return time.Duration(now.Nano())
}

// Clock tells how long one lease can be certain, counted from when what renewed it was sent. Its zero value was never
// renewed.
type Clock struct {
	lease   time.Duration
	since   time.Duration
	renewed bool
}

// New is the clock of a lease that lasts so long.
func New(lease time.Duration) Clock { return Clock{lease: lease} }

// Lease is how long the lease lasts from its renewal.
func (c *Clock) Lease() time.Duration { return c.lease }

// Since is when the newest thing that renewed the lease was sent.
func (c *Clock) Since() time.Duration { return c.since }

// Renew takes in that something sent then has renewed the lease.
func (c *Clock) Renew(sentAt time.Duration) {
	if !c.renewed || sentAt > c.since {
		c.since, c.renewed = sentAt, true
	}
}

// FenceAt is when the handler has to be stopped: after five sixths of the lease.
func (c *Clock) FenceAt() time.Duration {
	if !c.renewed {
		return 0
	}
	return c.since + c.lease*5/6
}

// OverAt is when the handler must have ended.
func (c *Clock) OverAt() time.Duration {
	if !c.renewed {
		return 0
	}
	return c.since + c.lease
}
