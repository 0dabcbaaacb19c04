// Package control is the long TCP connection between dispatchers and agents: both of its ends, and the frames between.
//
// The dispatcher runs a [Server], the agent a [Client]; they live in one package because services do not import each
// other. The package moves messages and knows who is connected and who is hungry. It decides nothing about tasks, never
// talks to Redis, and its callbacks run on reading goroutines, so they must not block: whoever needs Redis to answer
// hands the question on and replies later.
//
// Losing a connection, or dropping one whose peer does not read, is always safe: the agent comes back and says again
// who it is, what it waits for and what it runs, and all that the channel does can be had through Redis too, slower.
//
// A connection begins with CHALLENGE from the dispatcher, HELLO from the agent and WELCOME from the dispatcher. Both
// prove with an HMAC that they know the token, which itself never travels. After that either side sends what it likes.
package control
