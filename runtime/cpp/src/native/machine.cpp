#include "native/machine.hpp"

#include <dirent.h>
#include <sched.h>
#include <sys/utsname.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>
#include <vector>

namespace specrt::native {

namespace {

constexpr const char* kVectorUnits[] = {"avx2",        "avx_vnni", "avx512f", "avx512_vnni",
                                        "avx512_bf16", "amx_tile", "asimd",   "asimddp",
                                        "i8mm",        "sve",      "sve2"};
constexpr std::size_t kLongest = 255;

std::string text_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string stripped(const std::string& text) {
  const auto begin = text.find_first_not_of(" \t\r\n");
  if (begin == text.npos) return "";
  return text.substr(begin, text.find_last_not_of(" \t\r\n") - begin + 1);
}

// One line of printable characters, as a record keeps it.
std::string plain(const std::string& text) {
  std::string printable;
  for (const char c : text)
    if (static_cast<unsigned char>(c) >= 0x20 && c != 0x7F) printable += c;
  return stripped(printable).substr(0, kLongest);
}

// What the system says of its first processor.
std::map<std::string, std::string> processor() {
  std::istringstream lines(text_of("/proc/cpuinfo"));
  std::map<std::string, std::string> result;
  for (std::string line; std::getline(lines, line) && !line.empty();) {
    const std::size_t colon = std::min(line.find(':'), line.size());
    const std::string value = colon < line.size() ? line.substr(colon + 1) : "";
    result[stripped(line.substr(0, colon))] = stripped(value);
  }
  return result;
}

// x86 and ARM name their processors in their own ways; what is missing is left out.
std::string name_of(const std::map<std::string, std::string>& cpu) {
  std::string name = cpu.count("model name") ? cpu.at("model name") : "";
  for (const auto& [one, two] :
       {std::pair("cpu family", "model"), std::pair("CPU implementer", "CPU part")}) {
    if (!cpu.count(one) || !cpu.count(two)) continue;
    name += (name.empty() ? "" : ", ") + std::string(one) + " " + cpu.at(one) + " " + two + " " +
            cpu.at(two);
  }
  return name.empty() ? machine_name() : name;
}

std::string units_of(const std::map<std::string, std::string>& cpu) {
  const auto flags = cpu.find("flags"), features = cpu.find("Features");
  if (flags == cpu.end() && features == cpu.end()) return "";
  std::istringstream words(flags != cpu.end() ? flags->second : features->second);
  const std::vector<std::string> known{std::istream_iterator<std::string>(words), {}};
  std::string units;
  for (const char* unit : kVectorUnits)
    if (std::find(known.begin(), known.end(), unit) != known.end())
      units += (units.empty() ? "" : ", ") + std::string(unit);
  return units;
}

std::vector<std::string> gpus() {
  const std::string folder = "/proc/driver/nvidia/gpus";
  std::vector<std::string> places, named;
  if (DIR* opened = opendir(folder.c_str())) {
    while (const dirent* entry = readdir(opened))
      if (entry->d_name[0] != '.') places.push_back(folder + "/" + entry->d_name + "/information");
    closedir(opened);
  }
  std::sort(places.begin(), places.end());
  for (const std::string& place : places) {
    std::istringstream lines(text_of(place));
    for (std::string line; std::getline(lines, line);)
      if (line.compare(0, 6, "Model:") == 0) named.push_back(stripped(line.substr(6)));
  }
  return named;
}

// The power mode of a Jetson by name, by number where no name is known.
std::string power_mode() {
  const std::string status = text_of("/var/lib/nvpmodel/status");
  for (std::size_t at = status.find("pmode:"); at != status.npos;
       at = status.find("pmode:", at + 1)) {
    const std::size_t begin = at + 6, end = status.find_first_not_of("0123456789", begin);
    std::string number = status.substr(begin, std::min(end, status.size()) - begin);
    if (number.empty()) continue;
    number.erase(0, std::min(number.find_first_not_of('0'), number.size() - 1));
    std::string name = "mode " + number;
    std::istringstream words(text_of("/etc/nvpmodel.conf"));
    for (std::string word, id; words >> word;) {
      if (word.compare(0, 3, "ID=") == 0) id = word.substr(3);
      if (word.compare(0, 5, "NAME=") == 0 && id == number)
        name = word.substr(5, word.find('>') == word.npos ? word.npos : word.find('>') - 5);
    }
    return name;
  }
  return "";
}

std::string accelerator() {
  std::vector<std::string> named = gpus();
  if (named.empty()) named = {plain(text_of("/proc/device-tree/model")), power_mode()};
  std::string all;
  for (const std::string& one : named)
    if (!one.empty()) all += (all.empty() ? "" : ", ") + one;
  return all;
}

bool to_number(const std::string& text, std::uint64_t& number) {
  const std::string digits = stripped(text);
  if (digits.empty() || digits.size() > 18 || digits.find_first_not_of("0123456789") != digits.npos)
    return false;
  number = std::stoull(digits);
  return true;
}

// The number after a word at the beginning of a line; 0 where there is none.
std::uint64_t entry(const std::string& text, const std::string& word) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string name, value;
    std::uint64_t number = 0;
    if (words >> name >> value && name == word && to_number(value, number)) return number;
  }
  return 0;
}

}  // namespace

std::optional<std::string> Machine::difference(const Machine& other) const {
  const auto differs = [](const std::string& before, const std::string& mine,
                          const std::string& its, const char* after = "") {
    const auto shown = [](const std::string& text) { return text.empty() ? "none" : text; };
    return mine == its ? "" : before + shown(mine) + ", not " + shown(its) + after;
  };
  const auto elsewhere = [&](const char* what, const std::string& mine, const std::string& its) {
    return differs("on another machine (" + std::string(what) + " ", mine, its, ")");
  };
  for (const std::string& found :
       {elsewhere("cpu", cpu, other.cpu),
        elsewhere("vector units", vector_units, other.vector_units),
        differs("on ", std::to_string(cores) + " cores", std::to_string(other.cores) + " cores"),
        elsewhere("accelerator", accelerator, other.accelerator),
        differs("with ", library, other.library)})
    if (!found.empty()) return found;
  return std::nullopt;
}

Machine this_machine(const std::string& library) {
  const auto cpu = processor();
  return {plain(name_of(cpu)), units_of(cpu), cores_here(), plain(accelerator()), plain(library)};
}

std::string machine_name() {
  utsname found;
  return uname(&found) == 0 ? found.machine : "";
}

int cores_here() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

std::uint64_t available_bytes() {
  const std::uint64_t free = entry(text_of("/proc/meminfo"), "MemAvailable:") << 10;
  const std::string group = "/sys/fs/cgroup/";
  std::uint64_t most = 0, taken = 0;
  if (!to_number(text_of(group + "memory.max"), most) ||
      !to_number(text_of(group + "memory.current"), taken))
    return free;
  const std::uint64_t droppable = entry(text_of(group + "memory.stat"), "inactive_file");
  // A group over its limit has nothing left; 0 would mean that nothing is known.
  const std::uint64_t left = most + droppable > taken ? most + droppable - taken : 1;
  return free == 0 ? left : std::min(free, left);
}

}  // namespace specrt::native
