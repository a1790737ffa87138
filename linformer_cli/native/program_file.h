// Reads a program file (docs/reference/formats.md). The file is not trusted: `read_program` checks every number that
// the engine uses as an index or a size, and program_rules.h checks the operations.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "drawing.h"
#include "program.h"
#include "text.h"

namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "a program file is little-endian");

constexpr int64_t FILE_FORMATS = 3, ALIGNMENT = 64, CHECKED_FROM = 32, LARGEST_SIZE = INT32_MAX;

// The types of the numbers in a buffer, and their sizes in bytes.
enum class Type { FLOAT32, FLOAT64, BFLOAT16, INT16, INT32, INT64 };
constexpr int64_t TYPE_BYTES[] = {4, 8, 2, 2, 4, 8};

struct FileBuffer {
    int64_t kind;
    Type type;
    int64_t width;  // numbers for each image or row, or in total if the buffer is shared
    double initial;
    const char* data;  // of a shared buffer; null otherwise

    int64_t bytes() const { return width * TYPE_BYTES[static_cast<int>(type)]; }
};

struct FileOperation {
    Text name;
    Operation arguments;  // `check_program` finds the code
};

struct FileProgram {
    int64_t channels, height, width, levels, classes, window, blocks, recent, label, output;
    Distribution distribution;
    std::vector<int64_t> palette;              // red, green, blue and opacity of each value, or empty
    std::vector<std::vector<int64_t>> states;  // the state buffers of each layer
    std::vector<FileBuffer> buffers;
    std::vector<FileOperation> operations;

    int64_t values() const { return channels * height * width; }
    int64_t bands() const { return palette.empty() ? channels : 4; }

    // Whether an image needs no class. The initial label is then `classes`, and the table of classes has a row for it.
    bool is_class_optional() const { return classes && buffers[label].initial == classes; }
    // The number of labels: the classes, and no class if that is possible.
    int64_t label_count() const { return classes + is_class_optional(); }
};

// Takes words of eight bytes from the file. After the first fault, `sound` is false and every word is 0.
class Words {
public:
    Words(const char* data, int64_t bytes, int64_t at) : data(data), bytes(bytes), at(at) {}

    bool sound = true;

    // The next word; `length` bytes of it if A is an array of characters.
    template <class A>
    A take() {
        A word{};
        sound = sound && bytes - at >= static_cast<int64_t>(sizeof word);
        if (!sound) return word;
        std::memcpy(&word, data + at, sizeof word);
        at += sizeof word;
        return word;
    }

    // The next integer, which must be between `least` and `most`.
    int64_t integer(int64_t least, int64_t most) {
        const int64_t found = take<int64_t>();
        sound = sound && least <= found && found <= most;
        return sound ? found : 0;
    }

    Text name() {
        struct Name {
            char letters[32];
        } const found = take<Name>();
        char ended[sizeof found + 1] = {};  // a name of 32 letters has no 0 at its end
        std::memcpy(ended, found.letters, sizeof found);
        return ended;
    }

private:
    const char* const data;
    const int64_t bytes;
    int64_t at;
};

// CRC-32 as in zlib and PNG.
inline uint32_t checksum(const char* data, int64_t bytes) {
    uint32_t table[256], crc = ~0u;
    for (uint32_t n = 0; n < 256; n++) {
        table[n] = n;
        for (int bit = 0; bit < 8; bit++) table[n] = table[n] & 1 ? 0xedb88320u ^ table[n] >> 1 : table[n] >> 1;
    }
    for (int64_t n = 0; n < bytes; n++) crc = table[(crc ^ static_cast<uint8_t>(data[n])) & 255] ^ crc >> 8;
    return ~crc;
}

// Reads a buffer of integers that start as 0, as -1 where this stands for no position, or as `initial`; or of floats.
inline FileBuffer read_buffer(Words& words, const char* data, int64_t bytes, int64_t initial) {
    const int64_t kind = words.integer(SHARED, SCRATCH);
    const Type type = static_cast<Type>(words.integer(0, static_cast<int64_t>(Type::INT64)));
    FileBuffer found{kind, type, words.integer(0, LARGEST_SIZE), words.take<double>(), nullptr};
    const int64_t offset = words.integer(0, bytes);
    const bool known = found.initial == 0 || found.initial == -1 || found.initial == initial;
    words.sound = words.sound && (type <= Type::BFLOAT16 || known);
    if (kind == SHARED) {
        words.sound = words.sound && offset % ALIGNMENT == 0 && found.bytes() <= bytes - offset;
        found.data = data + offset;
    }
    return found;
}

inline FileOperation read_operation(Words& words, int64_t buffers) {
    FileOperation found{words.name(), {}};
    Operation& op = found.arguments;
    for (int64_t& index : op.buffer) index = -1;
    const int64_t indices = words.integer(0, BUFFERS);
    for (int64_t n = 0; n < indices; n++) op.buffer[n] = words.integer(-1, buffers - 1);
    const int64_t integers = words.integer(0, INTEGERS);
    for (int64_t n = 0; n < integers; n++) op.integer[n] = words.integer(0, LARGEST_SIZE);
    const int64_t reals = words.integer(0, REALS);
    for (int64_t n = 0; n < reals; n++) op.real[n] = words.take<double>();
    return found;
}

// Reads the header of `data`, which starts at a multiple of ALIGNMENT and must outlive `program`. Returns a message if
// the file is not a sound program, else an empty text. `verify` asks for the checksum.
inline Text read_program(const char* data, int64_t bytes, FileProgram& program, bool verify = true) {
    if (bytes < CHECKED_FROM || std::memcmp(data, "LINTXPRG", 8)) return "this is not a program file of lintx";
    Words words(data, bytes, 8);
    const int64_t format = words.take<int64_t>(), size = words.take<int64_t>(), sum = words.take<int64_t>();
    if (format < 1 || format > FILE_FORMATS)
        return Text("the file has format ") << format << ", this program reads 1 to " << FILE_FORMATS;
    if (size != bytes) return Text("the file has ") << bytes << " bytes instead of " << size;
    if (verify && sum != checksum(data + CHECKED_FROM, bytes - CHECKED_FROM))
        return "the file is damaged: its checksum is wrong";
    const int64_t longest = 1 << 16, most_values = 1 << 24;
    program.channels = words.integer(1, format == 3 ? 1 : 4);
    words.sound = words.sound && program.channels != 2;
    program.height = words.integer(1, longest);
    program.width = words.integer(1, longest);
    program.levels = program.distribution.levels = words.integer(2, 256);
    words.integer(0, 0);  // the order of the values
    program.distribution.mixtures = words.integer(0, MOST_LEVELS);
    program.distribution.lowest = words.take<double>();
    program.distribution.highest = words.take<double>();
    program.classes = words.integer(0, LARGEST_SIZE);
    program.window = words.integer(1, longest);
    program.blocks = format == 1 ? 0 : words.integer(0, program.window == 1 ? bytes / 8 : 0);
    program.palette.resize(format == 3 ? program.levels : 0);
    for (int64_t& colour : program.palette) colour = words.integer(0, UINT32_MAX);
    program.recent = words.integer(0, bytes);
    program.label = words.integer(-1, bytes);
    program.output = words.integer(0, bytes);
    program.states.resize(words.integer(0, bytes / 8));
    for (std::vector<int64_t>& layer : program.states) {
        layer.resize(words.integer(0, bytes / 8));
        for (int64_t& index : layer) index = words.integer(0, bytes);
        if (!words.sound) break;
    }
    const int64_t buffers = words.integer(0, bytes / 8);
    for (int64_t n = 0; n < buffers && words.sound; n++) {
        const int64_t initial = n == program.label ? program.classes : 0;
        program.buffers.push_back(read_buffer(words, data, bytes, initial));
    }
    const int64_t operations = words.integer(0, bytes / 8);
    words.sound = words.sound && program.blocks <= operations;
    for (int64_t n = 0; n < operations && words.sound; n++)
        program.operations.push_back(read_operation(words, buffers));
    if (!words.sound || program.values() > most_values) return "the file is damaged: its header is not valid";
    return "";
}

}  // namespace
