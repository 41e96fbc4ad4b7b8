package wire

import (
	"encoding/binary"
	"fmt"
	"math"
	"unsafe"
)

// Half is a value of IEEE 754 binary16: the bits, as stored.
type Half uint16

// Brain is a value of bfloat16: the bits, as stored.
type Brain uint16

// Float32 returns the same number; every Half has one.
func (h Half) Float32() float32 {
	sign := uint32(h>>15) << 31
	exponent := uint32(h>>10) & 0x1f
	fraction := uint32(h) & 0x3ff
	switch exponent {
	case 0: // zero, or subnormal: the fraction counts units of 2^-24
		value := float32(fraction) * (1.0 / (1 << 24))
		return math.Float32frombits(math.Float32bits(value) | sign)
	case 0x1f:
		return math.Float32frombits(sign | 0xff<<23 | fraction<<13)
	}
	return math.Float32frombits(sign | (exponent+127-15)<<23 | fraction<<13)
}

// Float32 returns the same number; every Brain has one.
func (b Brain) Float32() float32 { return math.Float32frombits(uint32(b) << 16) }

// BrainOf returns the nearest bfloat16, ties to even.
func BrainOf(value float32) Brain {
	bits := math.Float32bits(value)
	if value != value {
		return Brain(bits>>16 | 0x40) // a NaN stays one
	}
	return Brain((bits + 0x7fff + bits>>16&1) >> 16)
}

// HalfOf returns the nearest binary16, ties to even; what is too large becomes an infinity.
func HalfOf(value float32) Half {
	bits := math.Float32bits(value)
	sign := Half(bits >> 16 & 0x8000)
	magnitude := bits & 0x7fffffff
	switch {
	case magnitude > 0x7f800000:
		return sign | 0x7e00 | Half(magnitude>>13&0x3ff) // a NaN stays one
	case magnitude >= 0x47800000: // 65,536 and more
		return sign | 0x7c00
	case magnitude < 0x38800000: // below 2^-14: units of 2^-24
		return sign | Half(math.RoundToEven(float64(math.Float32frombits(magnitude))*(1<<24)))
	}
	rounded := magnitude + 0xfff + magnitude>>13&1
	return sign | Half((rounded-(127-15)<<23)>>13) // 65,520 and more round up to the infinity
}

// Value is a type that rows consist of.
type Value interface{ float32 | Half | Brain }

// View returns little-endian bytes as values: the same memory, or a copy where the bytes are not
// aligned or this machine is not little-endian. The length must be a multiple of the value's size.
func View[T Value](data []byte) ([]T, error) {
	size := int(unsafe.Sizeof(*new(T)))
	if len(data)%size != 0 {
		return nil, fmt.Errorf("%d bytes are no whole number of values of %d", len(data), size)
	}
	if len(data) == 0 {
		return nil, nil
	}
	if littleEndian && uintptr(unsafe.Pointer(&data[0]))%uintptr(size) == 0 {
		return unsafe.Slice((*T)(unsafe.Pointer(&data[0])), len(data)/size), nil
	}
	values := make([]T, len(data)/size)
	for i := range values {
		switch value := any(&values[i]).(type) {
		case *float32:
			*value = math.Float32frombits(binary.LittleEndian.Uint32(data[4*i:]))
		case *Half:
			*value = Half(binary.LittleEndian.Uint16(data[2*i:]))
		case *Brain:
			*value = Brain(binary.LittleEndian.Uint16(data[2*i:]))
		}
	}
	return values, nil
}

// Bytes returns values as little-endian bytes: the same memory, or a copy where this machine is not
// little-endian.
func Bytes[T Value](values []T) []byte {
	if len(values) == 0 {
		return nil
	}
	size := int(unsafe.Sizeof(values[0]))
	data := unsafe.Slice((*byte)(unsafe.Pointer(&values[0])), len(values)*size)
	if littleEndian {
		return data
	}
	swapped := make([]byte, len(data))
	for i := range swapped {
		swapped[i] = data[i/size*size+size-1-i%size]
	}
	return swapped
}

var littleEndian = binary.NativeEndian.Uint16([]byte{1, 0}) == 1
