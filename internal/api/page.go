package api

import (
	"encoding/base64"
	"encoding/json"
	"errors"

	"connectrpc.com/connect"
)

const (
	defaultPage = 50
	maxPage     = 1000
)

func pageSize(limit uint32) int {
	if limit == 0 {
		return defaultPage
	}
	return int(min(limit, maxPage))
}

// cursor is where a listing goes on. Clients see it as an opaque token.
type cursor struct {
	// Group is the index that is being listed, by its place in groups.
	Group int `json:"g"`
	// ID is the last task that was passed.
	ID string `json:"i,omitempty"`
	// At is the last task's score in its index, in ms.
	At int64 `json:"t,omitempty"`
	// Pos is the position behind it in the index.
	Pos int64 `json:"p,omitempty"`
	// Entry and Lane are the last task's in the dispatch streams.
	Entry string `json:"e,omitempty"`
	Lane  string `json:"l,omitempty"`
}

func (c cursor) token() string {
	b, err := json.Marshal(c)
	if err != nil {
		panic("encode page token: " + err.Error()) // a struct of strings and numbers always can be
	}
	return base64.RawURLEncoding.EncodeToString(b)
}

func parseCursor(token string) (cursor, error) {
	var c cursor
	if token == "" {
		return c, nil
	}
	b, err := base64.RawURLEncoding.DecodeString(token)
	if err == nil {
		err = json.Unmarshal(b, &c)
	}
	if err != nil || c.Group < 0 || c.Group >= len(groups) || c.Pos < 0 || len(c.ID) > 256 || len(c.Entry) > 64 {
		return cursor{}, connect.NewError(connect.CodeInvalidArgument,
			errors.New("page token is not one of ours: take nextPageToken of the last response, or none to begin"))
	}
	return c, nil
}
