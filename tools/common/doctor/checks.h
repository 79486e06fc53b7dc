// The checks of the doctor: one function each. doctor.cpp has the table of them.
//
// A check adds what it finds to its report. It throws nothing but Error and TimeOver; doctor.cpp turns these into
// findings, but for Error(device).
#pragma once

#include "tools/common/doctor/diagnosis.h"
#include "tools/common/doctor/examination.h"

namespace quern {

// With a reference: known_models.h.
void check_known_answers(Examination& e, CheckReport& report);
void check_known_numbers(Examination& e, CheckReport& report);

// Without one.
void check_texts(Examination& e, CheckReport& report);
void check_entropy(Examination& e, CheckReport& report);
void check_repetition(Examination& e, CheckReport& report);
void check_experts(Examination& e, CheckReport& report);
void check_activations(Examination& e, CheckReport& report);
void check_turn(Examination& e, CheckReport& report);
void check_tool_call(Examination& e, CheckReport& report);
void check_recall(Examination& e, CheckReport& report);

// This machine.
void check_same_answer(Examination& e, CheckReport& report);
void check_against_cpu(Examination& e, CheckReport& report);
void check_card(Examination& e, CheckReport& report);

}  // namespace quern
