package wire

import (
	"bytes"
	"math"
	"testing"
)

func TestNo16BitPatternIsLost(t *testing.T) {
	for bits := 0; bits < 1<<16; bits++ {
		if back := HalfOf(Half(bits).Float32()); back != Half(bits) && !isNaN(Half(bits).Float32(), back.Float32()) {
			t.Fatalf("half %04x became %04x", bits, back)
		}
		if back := BrainOf(Brain(bits).Float32()); back != Brain(bits) && !isNaN(Brain(bits).Float32(), back.Float32()) {
			t.Fatalf("brain %04x became %04x", bits, back)
		}
	}
}

func isNaN(values ...float32) bool {
	for _, value := range values {
		if value == value {
			return false
		}
	}
	return true
}

func TestRoundingIsToTheNearestAndTiesToEven(t *testing.T) {
	for _, c := range []struct {
		value float32
		half  Half
		brain Brain
	}{
		{1, 0x3c00, 0x3f80},
		{-2, 0xc000, 0xc000},
		{65504, 0x7bff, 0x4780},
		{65519.996, 0x7bff, 0x4780},
		{65520, 0x7c00, 0x4780},
		{1e10, 0x7c00, 0x5015},
		{5.9604645e-8, 0x0001, 0x3380},
		{2.9802322e-8, 0x0000, 0x3300}, // a tie: to even
		{8.940697e-8, 0x0002, 0x33c0},  // a tie: to even
		{6.1035156e-5, 0x0400, 0x3880},
		{6.1005354e-5, 0x0400, 0x3880}, // a tie: to even
		{6.097555e-5, 0x03ff, 0x3880},
		{1.00390625, 0x3c04, 0x3f80}, // a tie of bfloat16
		{1.01171875, 0x3c0c, 0x3f82}, // a tie of bfloat16
		{float32(math.Inf(-1)), 0xfc00, 0xff80},
		{float32(math.Copysign(0, -1)), 0x8000, 0x8000},
	} {
		if got := HalfOf(c.value); got != c.half {
			t.Errorf("half of %g: %04x, not %04x", c.value, got, c.half)
		}
		if got := BrainOf(c.value); got != c.brain {
			t.Errorf("brain of %g: %04x, not %04x", c.value, got, c.brain)
		}
	}
}

func TestAViewIsTheSameMemoryAndAnUnalignedOneTheSameValues(t *testing.T) {
	values := []float32{1, -2.5, 3e30}
	data := Bytes(values)
	view, err := View[float32](data)
	if err != nil {
		t.Fatal(err)
	}
	view[0] = 7
	if values[0] != 7 {
		t.Error("the view is a copy")
	}
	shifted := append(make([]byte, 1), data...)[1:]
	copied, err := View[float32](shifted)
	if err != nil || !bytes.Equal(Bytes(copied), data) {
		t.Errorf("%v, %v", copied, err)
	}
	if _, err := View[Half](data[:3]); err == nil {
		t.Error("half a value was taken")
	}
}
