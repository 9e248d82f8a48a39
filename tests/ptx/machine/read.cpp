// Reads the text of a PTX module with one kernel.
#include <algorithm>
#include <cctype>
#include <sstream>

#include "machine.h"

namespace ptx {
namespace {

std::string trimmed(const std::string& text) {
  size_t first = 0, last = text.size();
  while (first < last && std::isspace(static_cast<unsigned char>(text[first]))) ++first;
  while (last > first && std::isspace(static_cast<unsigned char>(text[last - 1]))) --last;
  return text.substr(first, last - first);
}

// At separators that no brace or bracket encloses.
std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> found;
  std::string word;
  int depth = 0;
  for (char c : text) {
    if (c == '{' || c == '[') ++depth;
    if (c == '}' || c == ']') --depth;
    if (c == separator && depth == 0) {
      found.push_back(trimmed(word));
      word.clear();
    } else {
      word += c;
    }
  }
  if (!trimmed(word).empty()) found.push_back(trimmed(word));
  return found;
}

uint64_t immediate(const std::string& text, unsigned width) {
  if (text.size() > 2 && text[0] == '0' && (text[1] == 'f' || text[1] == 'd')) {
    uint64_t bits = std::stoull(text.substr(2), nullptr, 16);
    if (text[1] == 'd' && width == 4)
      bits = std::bit_cast<uint32_t>(static_cast<float>(std::bit_cast<double>(bits)));
    return bits;
  }
  const bool negative = text[0] == '-';
  const uint64_t size = std::stoull(text.substr(negative), nullptr, 0);
  return negative ? 0 - size : size;
}

bool is_special(const std::string& name) {
  for (const char* known : {"%tid.", "%ntid.", "%ctaid.", "%nctaid.", "%laneid", "%warpid"})
    if (name.rfind(known, 0) == 0) return true;
  return false;
}

struct Reader {
  Program& program;
  Names names;
  uint32_t line = 0;
  std::vector<std::pair<size_t, std::string>> branches;  // to labels that may come later

  explicit Reader(Program& into) : program(into), names{into, {}, {}, {}, {}} {}

  // .param .u64 ... name, or .param .align 8 .b8 name[168]
  void parameter(const std::string& text) {
    std::istringstream words(text);
    std::string word;
    while (words >> word) {
    }
    const size_t open = word.find('[');
    names.symbols[word.substr(0, open)] = program.parameters;
    const size_t bytes = open == std::string::npos ? 8 : std::stoul(word.substr(open + 1));
    program.parameters += static_cast<uint32_t>((bytes + 7) / 8 * 8);
  }

  uint32_t registers(unsigned width, unsigned count) {  // width 0: predicates
    const uint32_t place = program.bytes;
    program.bytes += (width ? width * kLanes : 4u) * count;
    program.bytes = (program.bytes + 63) / 64 * 64;
    return place;
  }

  // .reg .b32 %r<7>, or .reg .f16 low, high; in braces within the code a name may come again
  void declaration(const std::string& text) {
    std::istringstream words(text);
    std::string kind, type, rest;
    words >> kind >> type;
    std::getline(words, rest, ';');
    const unsigned width = type == ".pred" ? 0 : width_of(type.substr(1));
    for (const std::string& name : split(rest, ',')) {
      const size_t open = name.find('<');
      if (open == std::string::npos) {
        names.scopes.back()[name] = {registers(width, 1), width, 1};
      } else {
        const unsigned count = static_cast<unsigned>(std::stoul(name.substr(open + 1)));
        names.banks[name.substr(0, open)] = {registers(width, count), width, count};
      }
    }
  }

  void statement(std::string text) {
    Instruction made;
    made.line = line;
    if (text[0] == '@') {
      size_t space = text.find_first_of(" \t");
      std::string guard = text.substr(1, space - 1);
      made.unless = guard[0] == '!';
      made.guard = names.predicate(guard.substr(made.unless));
      text = trimmed(text.substr(space));
    }
    Statement from;
    const size_t space = text.find_first_of(" \t{");
    from.opcode = text.substr(0, space);
    std::string opcode = from.opcode;
    std::replace(opcode.begin(), opcode.end(), '.', ' ');
    std::istringstream words(opcode);
    for (std::string word; words >> word;) from.parts.push_back(word);
    if (space != std::string::npos) from.operands = split(text.substr(space), ',');
    if (from.parts.empty()) throw Fault("no instruction: " + text);
    const std::string& name = from.parts[0];
    if (name == "bra") {
      made.kind = Kind::branch;
      branches.emplace_back(program.code.size(), from.operands.at(0));
    } else if (name == "ret" || name == "exit") {
      made.kind = Kind::exit;
    } else if (!decode_integers(from, names, made) && !decode_comparison(from, names, made) &&
               !decode_floats(from, names, made) && !decode_conversion(from, names, made) &&
               !decode_exchange(from, names, made) && !decode_memory(from, names, made) &&
               !decode_matrix(from, names, made) && !decode_meeting(from, names, made)) {
      throw Fault("the machine does not know: " + text);
    }
    if (made.kind != Kind::plain || made.run != nullptr) program.code.push_back(std::move(made));
  }

  void location(const std::string& text) {
    std::istringstream words(text);
    std::string kind;
    uint32_t file = 0, number = 0;
    words >> kind >> file >> number;
    line = file << 20 | (number & 0xfffff);
  }

  void file(const std::string& text) {
    std::istringstream words(text);
    std::string kind, name;
    int number = 0;
    words >> kind >> number >> name;
    name.erase(std::remove(name.begin(), name.end(), '"'), name.end());
    program.files[number] = name.substr(name.rfind('/') + 1);
  }

  // .extern .shared .align 16 .b8 name[]: what a launch asks for; it begins at 0
  void shared_memory(const std::string& text) {
    const size_t last = text.find('['), first = text.find_last_of(" \t", last) + 1;
    names.symbols[text.substr(first, last - first)] = 0;
  }

  void directive(const std::string& text) {
    if (text.rfind(".loc", 0) == 0) return location(text);
    if (text.rfind(".file", 0) == 0) return file(text);
    if (text.rfind(".reg ", 0) == 0) return declaration(text);
    if (text.rfind(".extern .shared", 0) == 0) return shared_memory(text);
    if (text.rfind(".reqntid", 0) == 0)
      program.threads = static_cast<unsigned>(std::stoul(text.substr(8)));
    if (text.rfind(".maxntid", 0) == 0)
      program.most_threads = static_cast<unsigned>(std::stoul(text.substr(8)));
    if (text.rfind(".target", 0) == 0) program.hopper = text.find("sm_80") == std::string::npos;
    if (text.rfind(".local", 0) == 0) throw Fault("local memory: " + text);
  }

  void open() {
    names.scopes.emplace_back();
    names.labels.emplace_back();
  }

  void close() {  // branches to its labels stand within
    std::erase_if(branches, [&](const auto& branch) {
      const auto found = names.labels.back().find(branch.second);
      if (found == names.labels.back().end()) return false;
      program.code[branch.first].number = found->second;
      return true;
    });
    names.scopes.pop_back();
    names.labels.pop_back();
  }

  void line_of_code(const std::string& text) {
    for (const std::string& one : split(text, ';')) {
      if (one.empty()) continue;
      if (one[0] == '.')
        directive(one);
      else if (names.scopes.empty())
        return;
      else if (one.back() == ':')
        names.labels.back()[one.substr(0, one.size() - 1)] = static_cast<int>(program.code.size());
      else
        statement(one);
    }
  }
};

}  // namespace

unsigned width_of(const std::string& type) {
  static const std::map<std::string, unsigned> widths = {
      {"b8", 1},    {"u8", 1},     {"s8", 1},    {"b16", 2},   {"u16", 2}, {"s16", 2},
      {"f16", 2},   {"bf16", 2},   {"b32", 4},   {"u32", 4},   {"s32", 4}, {"f32", 4},
      {"f16x2", 4}, {"bf16x2", 4}, {"b64", 8},   {"u64", 8},   {"s64", 8}, {"f64", 8},
      {"tf32", 4},  {"s16x2", 4},  {"u16x2", 4}, {"f32x2", 8},
  };
  const auto found = widths.find(type);
  return found == widths.end() ? 0 : found->second;
}

bool Statement::has(const char* part) const {
  return std::find(parts.begin(), parts.end(), part) != parts.end();
}

std::string Program::where(uint32_t line) const {
  const auto file = files.find(static_cast<int>(line >> 20));
  return (file == files.end() ? "?" : file->second) + ":" + std::to_string(line & 0xfffff);
}

const Register* Names::single(const std::string& name) const {
  for (auto scope = scopes.rbegin(); scope != scopes.rend(); ++scope)
    if (const auto found = scope->find(name); found != scope->end()) return &found->second;
  return nullptr;
}

bool Names::is_register(const std::string& operand) const {
  if (single(operand) != nullptr) return true;
  const size_t digit = operand.find_first_of("0123456789");
  return digit != std::string::npos && banks.count(operand.substr(0, digit)) != 0;
}

Register Names::reg(const std::string& name) {
  if (const Register* found = single(name)) return *found;
  if (is_register(name)) {
    const size_t digit = name.find_first_of("0123456789");
    const Register& bank = banks.at(name.substr(0, digit));
    const auto number = static_cast<uint32_t>(std::stoul(name.substr(digit)));
    if (number >= bank.count) throw Fault("no register: " + name);
    return {bank.place + number * (bank.width ? bank.width * kLanes : 4u), bank.width, 1};
  }
  if (is_special(name)) {
    auto [found, fresh] = specials.try_emplace(name, Register{program.bytes, 4, 1});
    if (fresh) {
      program.specials.push_back({program.bytes, name});
      program.bytes += 4 * kLanes;
    }
    return found->second;
  }
  throw Fault("no register: " + name);
}

uint32_t Names::place(const std::string& operand, unsigned width) {
  if (operand == "_") return kNowhere;
  if (operand[0] == '%' || is_register(operand)) {
    const Register found = reg(operand);
    if (found.width != width) throw Fault("a register of another width: " + operand);
    return found.place;
  }
  const auto symbol = symbols.find(operand);
  const uint64_t value = symbol == symbols.end() ? immediate(operand, width) : symbol->second;
  const uint64_t kept = width == 8 ? value : value & ((uint64_t{1} << 8 * width) - 1);
  auto [found, fresh] = constants.try_emplace({kept, width}, program.bytes);
  if (fresh) {
    program.constants.push_back({program.bytes, width, kept});
    program.bytes += width * kLanes;
  }
  return found->second;
}

uint32_t Names::predicate(const std::string& operand) {
  if (operand == "_") return kNowhere;
  if (operand[0] == '%' || is_register(operand)) {
    const Register found = reg(operand);
    if (found.width != 0) throw Fault("not a predicate: " + operand);
    return found.place;
  }
  return place(immediate(operand, 4) ? "-1" : "0", 4);  // its first four bytes: all lanes' bits
}

void Names::address(const std::string& operand, unsigned width, Instruction& made) {
  std::string inner = operand.substr(1, operand.size() - 2);
  inner.erase(
      std::remove_if(inner.begin(), inner.end(), [](unsigned char c) { return std::isspace(c); }),
      inner.end());
  const size_t plus = inner.find('+');
  const std::string base = inner.substr(0, plus);
  made.number =
      plus == std::string::npos ? 0 : static_cast<int64_t>(immediate(inner.substr(plus + 1), 8));
  made.o[0] = place(base, width);
}

std::vector<std::string> Names::vector(const std::string& operand) const {
  if (operand[0] != '{') return {operand};
  return split(operand.substr(1, operand.size() - 2), ',');
}

std::unique_ptr<Program> read(const std::string& text) {
  auto program = std::make_unique<Program>();
  Reader reader(*program);
  std::istringstream lines(text);
  bool in_parameters = false;
  for (std::string each; std::getline(lines, each);) {
    std::string code = trimmed(each.substr(0, each.find("//")));
    const size_t entry = code.find(".entry");
    if (entry != std::string::npos) {
      if (!program->name.empty()) throw Fault("a second kernel");
      program->name = trimmed(code.substr(entry + 6, code.find('(') - entry - 6));
      in_parameters = true;
      continue;
    }
    if (in_parameters) {
      in_parameters = code[0] != ')';
      if (code.rfind(".param", 0) == 0)
        reader.parameter(trimmed(code.substr(0, code.find_last_not_of(",)") + 1)));
      continue;
    }
    for (; !code.empty() && code[0] == '{'; code = trimmed(code.substr(1))) reader.open();
    // what closes a scope stands alone or after a statement's end
    size_t scopes = 0;
    for (size_t last; !code.empty() && code.back() == '}'; ++scopes) {
      last = code.find_last_not_of("} \t");
      if (last != std::string::npos && code[last] != ';') break;
      code = trimmed(code.substr(0, code.size() - 1));
    }
    if (!code.empty()) reader.line_of_code(code);
    for (size_t n = 0; n < scopes; ++n) reader.close();
    if (scopes && reader.names.scopes.empty()) break;  // debugging sections follow
  }
  std::istringstream again(text);  // files are named at the end
  for (std::string each; std::getline(again, each);)
    if (trimmed(each).rfind(".file", 0) == 0) reader.file(trimmed(each));
  if (!reader.branches.empty()) throw Fault("no label: " + reader.branches[0].second);
  find_meetings(*program);
  return program;
}

}  // namespace ptx
