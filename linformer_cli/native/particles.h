// Images that keep given values anywhere, by sequential Monte Carlo (Doucet, de Freitas, Gordon 2001).
//
// Many images, the particles, are drawn at once. Where a value is given, each takes it, and its weight is multiplied by
// the probability of that value. Before a value is drawn, the particles are resampled in proportion to their weights if
// these are uneven. In the end, one particle is chosen in proportion to its weight.
//
// Particles with the same values share one image of the batch, so resampling copies nothing. Only when they draw
// different values do some of them take a copy. All sums are float64 in a fixed order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "drawing.h"

namespace {

// Particles with the same values: their image in the batch, their number, and the logarithm of the weight of each.
struct Group {
    int64_t image, copies;
    double weight;
};

// How many particles of a group drew a value.
struct Drawn {
    int64_t value, copies;
};

// The values that the particles of a group draw with evenly spaced random numbers, of which `uniform` sets the first.
inline std::vector<Drawn> draw_copies(const Distribution& distribution, const float* parameters, const float* free,
                                      int64_t copies, double uniform) {
    std::vector<Drawn> drawn;
    for (int64_t n = 0; n < copies; n++) {
        const double place = (static_cast<double>(n) + uniform) / static_cast<double>(copies);
        const int64_t value = draw(distribution, parameters, free, place);
        const auto same =
            std::find_if(drawn.begin(), drawn.end(), [=](const Drawn& one) { return one.value == value; });
        if (same == drawn.end()) drawn.push_back({value, 1});
        else same->copies++;
    }
    return drawn;
}

struct Particles {
    int64_t count = 0;           // 0: no values are kept
    std::vector<int64_t> given;  // of each value of an image; -1: it is drawn
    std::vector<Group> groups;   // those that drew different values last are neighbours
    double evidence;             // logarithm of the probability of the values given before the last resampling
    double fewest;               // the smallest effective sample size so far

    double heaviest() const {
        double most = groups[0].weight;
        for (const Group& group : groups) most = std::max(most, group.weight);
        return most;
    }

    // The sum of the weights up to the end of each group, where the largest weight of a particle counts as 1.
    std::vector<double> add_up() const {
        const double most = heaviest();
        double sum = 0;
        std::vector<double> sums;
        for (const Group& group : groups)
            sums.push_back(sum += static_cast<double>(group.copies) * exponential(group.weight - most));
        return sums;
    }

    // The effective sample size: the squared sum of the weights, divided by the sum of their squares (Kong 1992).
    double measure_size() const {
        const double most = heaviest(), sum = add_up().back();
        double squares = 0;
        for (const Group& group : groups)
            squares += static_cast<double>(group.copies) * exponential(2 * (group.weight - most));
        return sum * sum / squares;
    }

    // The logarithm of the probability of all values given so far.
    double find_evidence() const {
        return evidence + heaviest() + logarithm(add_up().back() / static_cast<double>(count));
    }

    // Gives every group as many particles as its weight deserves, give or take one: systematic resampling (Kitagawa
    // 1996).
    void resample(double uniform) {
        const std::vector<double> sums = add_up();
        fewest = std::min(fewest, measure_size());
        evidence = find_evidence();
        int64_t before = 0;
        for (size_t n = 0; n < groups.size(); n++) {
            const double end = sums[n] / sums.back() * static_cast<double>(count);
            int64_t after = before;
            while (after < count && uniform < end - static_cast<double>(after)) after++;
            groups[n].copies = after - before;
            groups[n].weight = 0;
            before = after;
        }
        const auto is_empty = [](const Group& group) { return !group.copies; };
        groups.erase(std::remove_if(groups.begin(), groups.end(), is_empty), groups.end());
    }

    // Lets a group become one group for each value that it drew. Returns which image each image of the new batch
    // continues. As many as possible stay where they are.
    std::vector<int64_t> part(const std::vector<std::vector<Drawn>>& drawn) {
        const std::vector<Group> before = std::move(groups);
        groups.clear();
        for (size_t n = 0; n < before.size(); n++)
            for (const Drawn& one : drawn[n]) groups.push_back({before[n].image, one.copies, before[n].weight});
        std::vector<int64_t> ancestors(groups.size(), -1);
        std::vector<Group*> moving;
        for (Group& group : groups) {
            const size_t image = static_cast<size_t>(group.image);
            if (image < ancestors.size() && ancestors[image] < 0) ancestors[image] = group.image;
            else moving.push_back(&group);
        }
        auto free = ancestors.begin();
        for (Group* group : moving) {
            free = std::find(free, ancestors.end(), -1);
            *free = group->image;
            group->image = free - ancestors.begin();
        }
        return ancestors;
    }

    // The image of the particle that `uniform` chooses in proportion to the weights.
    int64_t choose(double uniform) const {
        const std::vector<double> sums = add_up();
        const auto found = std::upper_bound(sums.begin(), sums.end() - 1, uniform * sums.back());
        return groups[found - sums.begin()].image;
    }
};

}  // namespace
