package protojs

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"

	"google.golang.org/protobuf/reflect/protoreflect"
)

// mismatch notes a value of the wrong type for a whole field and passes over it.
func (d *decoder) mismatch(fd protoreflect.FieldDescriptor, tok json.Token) {
	d.problem("want %s, found %s%s", wanted(fd), describe(tok), remedy(fd, tok))
	d.skip(tok)
}

// mismatchOne does so for one element of a list or map, or a single field.
func (d *decoder) mismatchOne(fd protoreflect.FieldDescriptor, tok json.Token) {
	hint := ""
	if !fd.IsList() {
		hint = remedy(fd, tok)
	} else if n, ok := tok.(json.Number); ok && fd.Kind() == protoreflect.StringKind {
		hint = fmt.Sprintf(": write \"%s\"", shorten(n.String()))
	}
	d.problem("want %s, found %s%s", wantedOne(fd), describe(tok), hint)
	d.skip(tok)
}

// wanted names the type of a field in words.
func wanted(fd protoreflect.FieldDescriptor) string {
	switch {
	case fd.IsList():
		return "a list of " + plural(fd)
	case fd.IsMap():
		return "an object of " + plural(fd.MapValue())
	default:
		return wantedOne(fd)
	}
}

func wantedOne(fd protoreflect.FieldDescriptor) string {
	switch fd.Kind() {
	case protoreflect.BoolKind:
		return "true or false"
	case protoreflect.StringKind:
		return "a string"
	case protoreflect.BytesKind:
		return "a string in base64"
	case protoreflect.EnumKind:
		return "a word"
	case protoreflect.MessageKind, protoreflect.GroupKind:
		return "an object"
	case protoreflect.FloatKind, protoreflect.DoubleKind:
		return "a number"
	default:
		return "a whole number"
	}
}

func plural(fd protoreflect.FieldDescriptor) string {
	switch fd.Kind() {
	case protoreflect.BoolKind:
		return "true and false"
	case protoreflect.StringKind:
		return "strings"
	case protoreflect.BytesKind:
		return "strings in base64"
	case protoreflect.EnumKind:
		return "words"
	case protoreflect.MessageKind, protoreflect.GroupKind:
		return "objects"
	default:
		return "numbers"
	}
}

// describe says what was found.
func describe(tok json.Token) string {
	switch v := tok.(type) {
	case nil:
		return "null"
	case bool:
		return strconv.FormatBool(v)
	case json.Number:
		return "the number " + shorten(v.String())
	case string:
		return fmt.Sprintf("the string %q", shorten(v))
	case json.Delim:
		if v == '[' {
			return "a list"
		}
		return "an object"
	default:
		return fmt.Sprintf("%v", v)
	}
}

// remedy shows how the value would be written right, where that can be told.
func remedy(fd protoreflect.FieldDescriptor, tok json.Token) string {
	switch v := tok.(type) {
	case string:
		return remedyString(fd, v)
	case json.Number:
		if fd.Kind() == protoreflect.StringKind && !fd.IsList() && !fd.IsMap() {
			return fmt.Sprintf(": write \"%s\"", shorten(v.String()))
		}
	case json.Delim:
		if fd.IsMap() && v == '[' {
			return `: write {"NAME": "value"}`
		}
	}
	return ""
}

func remedyString(fd protoreflect.FieldDescriptor, s string) string {
	switch {
	case fd.IsList() && fd.Kind() == protoreflect.StringKind:
		words := strings.Fields(s)
		if len(words) == 0 || len(words) > 6 || len(s) > 80 || strings.ContainsAny(s, "\"'\\`$") {
			return `: write ["first", "second"]`
		}
		for i, w := range words {
			words[i] = strconv.Quote(w)
		}
		return ": write [" + strings.Join(words, ", ") + "]"
	case fd.IsList() || fd.IsMap():
		return ""
	case fd.Kind() == protoreflect.BoolKind && (s == "true" || s == "false"), isNumber(fd.Kind()) && looksNumeric(s):
		return ": write " + s + " without quotes"
	default:
		return ""
	}
}

func isNumber(kind protoreflect.Kind) bool {
	switch kind {
	case protoreflect.BoolKind, protoreflect.StringKind, protoreflect.BytesKind, protoreflect.EnumKind,
		protoreflect.MessageKind, protoreflect.GroupKind:
		return false
	default:
		return true
	}
}

func looksNumeric(s string) bool {
	var n json.Number
	return len(s) < 40 && json.Unmarshal([]byte(s), &n) == nil && n.String() == s
}

// suggest finds what an unknown name may have meant: a near name, the same name one level deeper, or all there are.
func suggest(md protoreflect.MessageDescriptor, key string) string {
	best, least := "", 3
	var names []string
	for i := range md.Fields().Len() {
		fd := md.Fields().Get(i)
		names = append(names, fd.JSONName())
		if n := distance(plain(key), plain(fd.JSONName())); n < least && n*2 <= len(fd.JSONName()) {
			best, least = fd.JSONName(), n
		}
	}
	if best == "" {
		best = deeper(md, key)
	}
	switch {
	case best != "":
		return fmt.Sprintf("did you mean %q?", best)
	case len(names) == 0:
		return "no field is known here"
	default:
		return "known are " + strings.Join(names, ", ")
	}
}

func deeper(md protoreflect.MessageDescriptor, key string) string {
	for i := range md.Fields().Len() {
		fd := md.Fields().Get(i)
		if fd.Message() == nil || fd.IsMap() {
			continue
		}
		if in := fd.Message().Fields().ByJSONName(key); in != nil && fd.Message().FullName().Parent() == md.FullName().Parent() {
			return fd.JSONName() + "." + in.JSONName()
		}
	}
	return ""
}

// plain takes away what people vary: case, dashes and underscores.
func plain(s string) string {
	return strings.NewReplacer("_", "", "-", "").Replace(strings.ToLower(shorten(s)))
}

// distance is the number of letters to add, drop, change or swap with their neighbour.
func distance(a, b string) int {
	var before, last, row []int
	for j := range len(b) + 1 {
		last = append(last, j)
	}
	for i := 1; i <= len(a); i++ {
		row = append([]int{i}, last[1:]...)
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			row[j] = min(row[j-1]+1, last[j]+1, last[j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				row[j] = min(row[j], before[j-2]+1)
			}
		}
		before, last = last, row
	}
	return last[len(b)]
}
